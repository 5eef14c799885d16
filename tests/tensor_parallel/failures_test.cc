// Collectives that fail and code that throws between them: every rank gets an error that
// says what was under way, and the next step, or the next start, is clean.
#include "tests/support/errors.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr milliseconds kSoon{300}, kLate{20'000};

const ShardedPair::Config kOneBlock = {
    .vocab = 12, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 2, .max_tokens = 8};

// Before a landing a third of the collectives fail that do at night.
int64_t stride(int64_t at_night) { return is_night() ? at_night : 3 * at_night; }

DeviceMesh faulty_mesh(int64_t dp, int64_t tp) {
  return init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
}

// Of all groups that a step uses, of which `fault` counts the collectives together.
void inject_into_all(const ShardedPair& pair, const std::shared_ptr<Fault>& fault,
                     milliseconds timeout) {
  inject_fault(pair.mesh["tp"].group(), fault, timeout);
  inject_fault(pair.mesh["dp"].group(), fault, timeout);
  inject_fault(pair.mesh["dp"].side_group(0, "reduce"), fault, timeout);
}

// The error of a step with `fault` in the way of its collectives; empty for none.
std::string error_of_step(int64_t dp, int64_t tp, bool cut_sequence,
                          const std::shared_ptr<Fault>& fault, milliseconds timeout) {
  ShardedPair pair(kOneBlock, faulty_mesh(dp, tp), cut_sequence);
  inject_into_all(pair, fault, timeout);
  try {
    pair.sharded_loss().backward();
    return "";
  } catch (const std::exception& error) {
    return text_of(error);
  }
}

int64_t collectives_of_step(int64_t dp, int64_t tp, bool cut_sequence) {
  int64_t issued = 0;
  run_ranks(dp * tp, [&](int64_t rank) {
    const auto none = std::make_shared<Fault>();
    EXPECT_EQ(error_of_step(dp, tp, cut_sequence, none, kLate), "");
    if (rank == 0) issued = none->issued;
  });
  return issued;
}

// `is_last`: no collective follows that would tell ranks of other groups.
void fail_at(int64_t at, int64_t faulty, int64_t dp, int64_t tp, bool cut_sequence,
             bool is_last = false) {
  run_ranks(dp * tp, [&](int64_t rank) {
    const auto kind = rank == faulty ? Fault::Kind::kError : Fault::Kind::kNone;
    const auto error = error_of_step(dp, tp, cut_sequence,
                                     std::make_shared<Fault>(Fault{.kind = kind, .at = at}), kSoon);
    if (is_last && rank % tp != faulty % tp && error.empty()) return;
    EXPECT_THAT(error, AnyOf(HasSubstr("redistribute of ["), HasSubstr("tensor-parallel gradients"),
                             HasSubstr("comparison of the first inputs"), HasSubstr(" of unit '"),
                             HasSubstr("the backward of rank ")))
        << "rank " << rank << ", collective " << at << " of rank " << faulty;
  });
}

void expect_clean_step(int64_t dp, int64_t tp, bool cut_sequence) {
  on_pairs(kOneBlock, dp, tp, cut_sequence, {}, [](ShardedPair& pair) {
    pair.backward();
    pair.expect_same_gradients();
  });
}

TEST(TensorParallelFaults, EveryCollectiveFailsOnceAndIsNamedOnAllRanks) {
  for (const bool cut_sequence : {false, true}) {
    const int64_t collectives = collectives_of_step(1, 2, cut_sequence);
    ASSERT_GE(collectives, 8);
    for (int64_t at = 0; at < collectives; at += stride(1)) fail_at(at, at % 2, 1, 2, cut_sequence);
    expect_clean_step(1, 2, cut_sequence);
  }
}

TEST(TensorParallelFaults, SoItIsWithinAMeshOfTwoDimensions) {
  const int64_t collectives = collectives_of_step(2, 2, /*cut_sequence=*/true);
  for (int64_t at = 0; at < collectives; at += stride(3))
    fail_at(at, at % 4, 2, 2, true, /*is_last=*/at + 6 >= collectives);
  expect_clean_step(2, 2, true);
}

// Code that throws on all ranks alike: no collective is left over.
TEST(TensorParallelFaults, AnErrorOfTheModelLeavesTheNextStepClean) {
  for (const bool cut_sequence : {false, true}) {
    on_pairs(kOneBlock, 2, 2, cut_sequence, {}, [](ShardedPair& pair) {
      auto& block = pair.sharded->blocks[0];
      const at::Tensor bad = pair.text.new_zeros({1, 2, 3});
      EXPECT_THROW(block->mlp->forward(block->attention->query->forward(bad)), c10::Error);
      const at::Tensor logits = pair.sharded->forward(pair.text[0].narrow(1, 0, 5));
      EXPECT_THROW(logits.matmul(torch::zeros({3, 5}, torch::kFloat64)), c10::Error);
      pair.backward();
      pair.expect_same_gradients();
    });
  }
}

// In a backward, when norms have terms that wait for its end.
TEST(TensorParallelFaults, AnErrorInABackwardDropsItsTerms) {
  on_pairs(kOneBlock, 2, 2, /*cut_sequence=*/true, {}, [](ShardedPair& pair) {
    const at::Tensor rows = pair.text[pair.data_rank()];
    at::Tensor embedded = pair.sharded->embedding->forward(rows.narrow(1, 0, 5));
    embedded.register_hook(
        [](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "thrown in a hook"); });
    const auto rotation = pair.sharded->rotation(0, 5, torch::kCPU);
    const at::Tensor out = pair.sharded->blocks[0]->forward(embedded, rotation);
    EXPECT_THAT(message_of([&] { out.square().sum().backward(); }), HasSubstr("thrown in a hook"));
    pair.sharded->zero_grad();
    pair.backward();
    pair.expect_same_gradients();
  });
}

// One rank that leaves alone: the others are told what they waited for.
TEST(TensorParallelFaults, ARankThatThrowsAloneIsMissedAndANewStartIsClean) {
  run_ranks(2, [](int64_t rank) {
    ShardedPair pair(kOneBlock, faulty_mesh(1, 2), /*cut_sequence=*/false);
    inject_into_all(pair, std::make_shared<Fault>(), kSoon);
    if (rank == 1) {
      at::Tensor embedded = pair.sharded->embedding->forward(pair.text[0].narrow(1, 0, 5));
      return;  // as an exception would, after the first collective
    }
    EXPECT_THAT(message_of([&] { pair.sharded_loss().backward(); }),
                AnyOf(HasSubstr("redistribute of ["), HasSubstr("comparison of the first inputs")));
  });
  expect_clean_step(1, 2, false);
}

}  // namespace
}  // namespace fsdp::testing
