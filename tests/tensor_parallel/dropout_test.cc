// Dropout of tensor-parallel models under manual_seed: the masks of one device, bit for
// bit, and its numbers.
#include "dtensor/manual_seed.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "on_demand/on_demand_storage.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/drawn_masks.h"
#include "tests/tensor_parallel/dropping_transformer.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <array>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kSeed = 17;

struct SeededStep {
  at::Tensor loss;  // whole
  std::vector<at::Tensor> masks;
  at::Tensor next;  // what is drawn after the step
};

// loss(), backward included, from the state that the generator has.
template <class Loss>
SeededStep step_of(const Loss& loss) {
  const DrawnMasks drawn;
  const at::Tensor found = loss();
  found.backward();
  return {full_tensor(found.detach()), drawn.masks(), torch::rand({3})};
}

// The same once it was seeded.
template <class Loss>
SeededStep seeded_step(const DeviceMesh& tp, const Loss& loss) {
  manual_seed(kSeed, tp);
  return step_of(loss);
}

void expect_same_steps(const SeededStep& found, const SeededStep& wanted) {
  expect_same_masks(found.masks, wanted.masks);
  EXPECT_LE(distance(found.loss, wanted.loss), kClose);
  EXPECT_TRUE(found.next.equal(wanted.next));
}

at::Tensor some_tokens() { return torch::arange(12).view({2, 6}) * 7 % kDropVocab; }

at::Tensor loss_of(DroppingTransformer& model, const at::Tensor& tokens) {
  return transformer_loss(model->forward(tokens), tokens);
}

struct DroppingPair {
  DroppingTransformer plain = drawn(1, [] { return DroppingTransformer(); });
  DroppingTransformer parallel = drawn(1, [] { return DroppingTransformer(); });

  DroppingPair(const DeviceMesh& tp, bool cut_sequence) {
    parallelize_module(parallel, tp, dropping_plan(cut_sequence));
  }
};

class TensorParallelDropout : public Worlds {};

TEST_P(TensorParallelDropout, OfATransformerIsThatOfOneDevice) {
  for (const bool cut_sequence : {false, true}) {
    SCOPED_TRACE(cut_sequence);
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      DroppingPair pair(mesh, cut_sequence);
      const at::Tensor tokens = some_tokens();
      const auto wanted = seeded_step(mesh, [&] { return loss_of(pair.plain, tokens); });
      const auto found = seeded_step(mesh, [&] { return loss_of(pair.parallel, tokens); });
      EXPECT_EQ(wanted.masks.size(), 9);
      expect_same_steps(found, wanted);
      expect_same_gradients(*pair.parallel, *pair.plain, kClose);
    });
  }
}

// One whose default generator was seeded.
TEST_P(TensorParallelDropout, IsThatOfADeviceWithoutManualSeed) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    DroppingPair pair(mesh, /*cut_sequence=*/false);
    const at::Tensor tokens = some_tokens();
    const SeededStep wanted = drawn_from_seed(
        kSeed, [&] { return step_of([&] { return loss_of(pair.plain, tokens); }); });
    expect_same_steps(seeded_step(mesh, [&] { return loss_of(pair.parallel, tokens); }), wanted);
  });
}

TEST_P(TensorParallelDropout, IsTheSameInTwoRunsAndNotInTwoSteps) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    DroppingPair pair(mesh, /*cut_sequence=*/true);
    const auto loss = [&] { return loss_of(pair.parallel, some_tokens()); };
    const auto first = seeded_step(mesh, loss);
    const auto next = step_of(loss);
    const auto again = seeded_step(mesh, loss);
    expect_same_masks(again.masks, first.masks);
    EXPECT_TRUE(again.loss.equal(first.loss));
    EXPECT_FALSE(next.loss.equal(first.loss));
  });
}

TEST_P(TensorParallelDropout, IsLeftOutInEvaluation) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    DroppingPair pair(mesh, /*cut_sequence=*/false);
    pair.plain->eval();
    pair.parallel->eval();
    const auto wanted = seeded_step(mesh, [&] { return loss_of(pair.plain, some_tokens()); });
    const auto found = seeded_step(mesh, [&] { return loss_of(pair.parallel, some_tokens()); });
    EXPECT_TRUE(wanted.masks.empty());
    expect_same_steps(found, wanted);
  });
}

torch::nn::Sequential make_dropping_mlp() {
  return torch::nn::Sequential(
      torch::nn::Linear(6, 7), torch::nn::RReLU(torch::nn::RReLUOptions()),
      torch::nn::Dropout(kDropped), torch::nn::Linear(7, 6), torch::nn::AlphaDropout(kDropped),
      torch::nn::Linear(6, 5),
      torch::nn::Dropout(torch::nn::DropoutOptions(kDropped).inplace(true)),
      torch::nn::FeatureAlphaDropout(kDropped), torch::nn::Linear(5, 4));
}

TEST_P(TensorParallelDropout, OfEveryKindInAnMlpIsThatOfOneDevice) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(1, make_dropping_mlp), parallel = drawn(1, make_dropping_mlp);
    parallelize_module(parallel, mesh,
                       {{"0", ColwiseParallel{}},
                        {"3", RowwiseParallel{}},
                        {"5", ColwiseParallel{}},
                        {"8", RowwiseParallel{}}});
    const at::Tensor input = drawn_tensor(2, {4, 3, 6});
    const auto loss = [&](torch::nn::Sequential& model) {
      return [&] { return model->forward(input).square().sum(); };
    };
    const auto wanted = seeded_step(mesh, loss(plain));
    expect_same_steps(seeded_step(mesh, loss(parallel)), wanted);
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

torch::nn::TransformerEncoderLayer make_dropping_encoder() {
  return torch::nn::TransformerEncoderLayer(
      torch::nn::TransformerEncoderLayerOptions(20, 5).dim_feedforward(26).dropout(kDropped));
}

const ParallelPlan kDroppingEncoderPlan = {{"self_attn", ColwiseParallel{.sections = 3}},
                                           {"linear1", ColwiseParallel{}},
                                           {"linear2", RowwiseParallel{}}};

// Masks of plain tensors, which styles hand out, and of DTensors, by turns.
TEST_P(TensorParallelDropout, OfAnEncoderLayerIsThatOfOneDevice) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(1, make_dropping_encoder), parallel = drawn(1, make_dropping_encoder);
    parallelize_module(parallel, mesh, kDroppingEncoderPlan);
    const at::Tensor input = drawn_tensor(2, {6, 3, 20});
    const auto loss = [&](torch::nn::TransformerEncoderLayer& model) {
      return [&] { return model->forward(input).pow(3).sum(); };
    };
    const auto wanted = seeded_step(mesh, loss(plain));
    EXPECT_EQ(wanted.masks.size(), 4);
    expect_same_steps(seeded_step(mesh, loss(parallel)), wanted);
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

TEST_P(TensorParallelDropout, TokensThatAreDrawnAreThoseOfOneDevice) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const programs::TransformerConfig config{
        .vocab = 67, .width = 24, .blocks = 1, .heads = 3, .kv_heads = 3, .max_tokens = 16};
    const auto make = [&] { return programs::Transformer(config); };
    auto plain = drawn(3, make), parallel = drawn(3, make);
    parallelize_module(parallel, mesh, transformer_plan(8, /*cut_sequence=*/false));
    const at::Tensor prompt = torch::tensor({3, 1, 4});
    manual_seed(kSeed, mesh);
    const at::Tensor wanted = plain->generate(prompt, 8, /*temperature=*/1);
    manual_seed(kSeed, mesh);
    EXPECT_TRUE(full_tensor(parallel->generate(prompt, 8, /*temperature=*/1)).equal(wanted));
  });
}

INSTANTIATE_WORLDS(TensorParallelDropout, 1, 2, 3);

// With fully_shard over dp; evicted and poisoned after every operator, or not.
class ShardedDropout : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { internal::set_evict_after_every_operator(GetParam()); }
  void TearDown() override { internal::set_evict_after_every_operator(false); }
};

// What the gradients of the ranks of a dimension average to.
void average_gradients(torch::nn::Module& plain, const DeviceMesh& dp) {
  for (const at::Tensor& parameter : plain.parameters()) {
    const at::Tensor grad = parameter.grad();
    const torch::NoGradGuard no_grad;
    const Placement mean = Partial{Partial::Op::kAvg};
    grad.copy_(from_local(grad.clone(), dp, {mean}).full_tensor());
  }
}

// `loss(model)` on dp x tp, beside the plain model seeded as the rank's slice.
template <class Model, class Loss>
SeededStep compare_sharded(Model& plain, Model& sharded, const DeviceMesh& mesh, const Loss& loss) {
  const auto wanted = seeded_step(mesh["tp"], [&] { return loss(plain); });
  const auto found = seeded_step(mesh["tp"], [&] { return loss(sharded); });
  expect_same_steps(found, wanted);
  average_gradients(*plain, mesh["dp"]);
  expect_same_gradients(*sharded, *plain, kClose);
  return found;
}

TEST_P(ShardedDropout, IsThatOfOneDeviceAndDiffersBetweenDataRanks) {
  for (const bool cut_sequence : {false, true}) {
    SCOPED_TRACE(cut_sequence);
    std::array<std::vector<at::Tensor>, 4> masks;
    run_ranks(4, [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
      DroppingPair pair(mesh["tp"], cut_sequence);
      for (auto* block : {&pair.parallel->block0, &pair.parallel->block1})
        fully_shard(*block, mesh["dp"]);
      fully_shard(pair.parallel, mesh["dp"]);
      const at::Tensor tokens = some_tokens().roll(mesh["dp"].local_rank(), 1);
      masks[static_cast<size_t>(rank)] =
          compare_sharded(pair.plain, pair.parallel, mesh, [&](DroppingTransformer& model) {
            return loss_of(model, tokens);
          }).masks;
    });
    expect_same_masks(masks[1], masks[0]);
    expect_same_masks(masks[3], masks[2]);
    for (size_t i = 0; i < masks[0].size(); ++i) EXPECT_FALSE(masks[2][i].equal(masks[0][i])) << i;
  }
}

TEST_P(ShardedDropout, OfAnEncoderLayerIsThatOfOneDevice) {
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    auto plain = drawn(1, make_dropping_encoder), sharded = drawn(1, make_dropping_encoder);
    parallelize_module(sharded, mesh["tp"], kDroppingEncoderPlan);
    fully_shard(sharded, mesh["dp"]);
    const at::Tensor input = drawn_tensor(2, {6, 3, 20});
    compare_sharded(plain, sharded, mesh, [&](torch::nn::TransformerEncoderLayer& model) {
      return model->forward(input).pow(3).sum();
    });
  });
}

TEST_P(ShardedDropout, IsTheSameWhereBlocksRunAgainInBackward) {
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    DroppingPair pair(mesh["tp"], /*cut_sequence=*/true);
    fully_shard(pair.parallel, mesh["dp"]);
    pair.parallel->run = [](DroppingBlock& block, const at::Tensor& x) {
      return checkpoint(block, x);
    };
    const auto loss = [](DroppingTransformer& model) { return loss_of(model, some_tokens()); };
    const auto wanted = seeded_step(mesh["tp"], [&] { return loss(pair.plain); });
    const auto found = seeded_step(mesh["tp"], [&] { return loss(pair.parallel); });
    EXPECT_LE(distance(found.loss, wanted.loss), kClose);
    EXPECT_TRUE(found.next.equal(wanted.next));
    EXPECT_EQ(found.masks.size(), wanted.masks.size() + 8);
    average_gradients(*pair.plain, mesh["dp"]);
    expect_same_gradients(*pair.parallel, *pair.plain, kClose);
  });
}

INSTANTIATE_TEST_SUITE_P(, ShardedDropout, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Evicted" : "Resident"; });

}  // namespace
}  // namespace fsdp::testing
