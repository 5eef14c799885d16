// Fewer key heads than ranks: key and value are whole on every rank, and each rank's
// query heads take what they need of them.
#include "programs/trainer/model/transformer.h"
#include "tensor_parallel/communication_log.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <optional>

namespace fsdp::testing {
namespace {

constexpr int64_t kLayers = 2, kHeadSize = 8;

ParallelPlan plan_of_keys(std::optional<ReplicateParallel> replicated, bool cut_sequence) {
  ParallelPlan plan = transformer_plan(kHeadSize, cut_sequence);
  if (replicated.has_value()) {
    plan.emplace_back("block*.attention.key", *replicated);
    plan.emplace_back("block*.attention.value", *replicated);
  }
  return plan;
}

// Reduce-scatters are all that is neither an all-reduce nor an all-gather, as
// CountedCollectives has it.
CollectiveCounts counts_in(const CommunicationLog& log, bool in_backward) {
  CollectiveCounts counts;
  for (const auto& each : log.entries()) {
    if (each.in_backward != in_backward) continue;
    ++(each.collective == "all-reduce"   ? counts.all_reduces
       : each.collective == "all-gather" ? counts.all_gathers
                                         : counts.reduce_scatters);
  }
  return counts;
}

// Of a second step, whose numbers are those of one device. The log has what is counted.
StepCounts counts_of_step(const programs::TransformerConfig& config, const ParallelPlan& plan,
                          const DeviceMesh& mesh) {
  const auto make = [&] { return programs::Transformer(config); };
  auto plain = drawn(3, make), model = drawn(3, make);
  parallelize_module(model, mesh, plan);
  const at::Tensor tokens = torch::arange(16).view({2, 8});
  transformer_loss(plain->forward(tokens), tokens).backward();
  transformer_loss(model->forward(tokens), tokens).backward();
  model->zero_grad();
  CountedCollectives counted(mesh);
  const CommunicationLog log;
  const at::Tensor loss = transformer_loss(model->forward(tokens), tokens);
  StepCounts counts{.forward = counted.take(), .backward = {}};
  loss.backward();
  counts.backward = counted.take();
  EXPECT_EQ(counts_in(log, /*in_backward=*/false), counts.forward);
  EXPECT_EQ(counts_in(log, /*in_backward=*/true), counts.backward);
  expect_same_gradients(*model, *plain, kClose);
  return counts;
}

class ReplicatedKeys : public Worlds {
 protected:
  // Some head on every rank: attention is gathered where one has none.
  programs::TransformerConfig config(int64_t kv_heads) const {
    const int64_t heads = world() == 3 ? 6 : 4;
    return {.vocab = 64,
            .width = kHeadSize * heads,
            .blocks = kLayers,
            .heads = heads,
            .kv_heads = kv_heads,
            .max_tokens = 8};
  }
};

// In backward the gradients of all keys and values are summed together, where a head's
// come from all ranks; of several heads each is put together where autograd needs it
// whole.
TEST_P(ReplicatedKeys, CostNothingInForward) {
  for (const int64_t kv_heads : {1, 2}) {
    if (kv_heads >= world()) continue;
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto counts =
          counts_of_step(config(kv_heads), plan_of_keys(ReplicateParallel{}, false), mesh);
      EXPECT_EQ(counts.forward,
                (CollectiveCounts{.all_reduces = 2 * kLayers + 1, .all_gathers = 1}));
      const CollectiveCounts sums{.all_reduces = 2 * kLayers + 2 + 1};
      const CollectiveCounts heads{.all_reduces = 2 * kLayers + 2, .all_gathers = 2 * kLayers};
      EXPECT_EQ(counts.backward, kv_heads == 1 ? sums : heads);
    });
  }
}

// Without a style they stay cut along the tokens, as their input is, until attention.
TEST_P(ReplicatedKeys, AreNotGatheredWithTheirInput) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto counts = counts_of_step(config(1), plan_of_keys(ReplicateParallel{}, true), mesh);
    EXPECT_EQ(counts.forward.all_reduces, 0);
    EXPECT_EQ(counts.forward.all_gathers, 2 * kLayers + 2);
  });
}

// With the input that the query gathers anyway, nothing moves but what the plan asks for.
TEST_P(ReplicatedKeys, TakeTheWholeInputOfACutSequenceWithTheQuery) {
  for (const int64_t kv_heads : {1, 2}) {
    if (kv_heads >= world()) continue;
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const ReplicateParallel whole_input{.input_layout = Replicate{}};
      const RedistributionPolicy policy(Redistribution::kExplicit);
      const auto counts = counts_of_step(config(kv_heads), plan_of_keys(whole_input, true), mesh);
      EXPECT_EQ(counts.forward, (CollectiveCounts{.all_gathers = 2 * kLayers + 2,
                                                  .reduce_scatters = 2 * kLayers + 1}));
    });
  }
}

TEST_P(ReplicatedKeys, ThatAreCutShareOneGatherWithTheQuery) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto of_keys = config(/*kv_heads=*/world() == 3 ? 6 : 4);
    const auto plain = counts_of_step(of_keys, plan_of_keys({}, false), mesh);
    EXPECT_EQ(plain.forward, (CollectiveCounts{.all_reduces = 2 * kLayers + 1, .all_gathers = 1}));
    EXPECT_EQ(plain.backward, (CollectiveCounts{.all_reduces = 2 * kLayers + 2}));
    const auto cut = counts_of_step(of_keys, plan_of_keys({}, true), mesh);
    EXPECT_EQ(cut.forward, (CollectiveCounts{.all_gathers = 2 * kLayers + 2,
                                             .reduce_scatters = 2 * kLayers + 1}));
    EXPECT_EQ(cut.backward, (CollectiveCounts{.all_reduces = 2,
                                              .all_gathers = 2 * kLayers + 1,
                                              .reduce_scatters = 2 * kLayers + 1}));
  });
}

INSTANTIATE_WORLDS(ReplicatedKeys, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
