// Every combination of a mesh, a resharding policy, a kind of parameters and a way to
// accumulate: the unsharded numbers, and nothing left behind.
#include "tests/fully_shard/resharding/policies.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kDepth = 2, kSteps = 5;

torch::optim::AdamW optimizer_of(const VariedModel& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-3));
}

// One device that sees the data of all ranks.
void train_plain(VariedModel& model, int64_t ranks, Accumulation accumulation) {
  auto optimizer = optimizer_of(model);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < micro_batches(accumulation); ++micro) {
      for (int64_t rank = 0; rank < ranks; ++rank)
        (loss_on(model, tokens_of(model, step, micro, rank)) / ranks).backward();
    }
    optimizer.step();
  }
}

class PolicyProduct : public ::testing::TestWithParam<Policies> {
 protected:
  void train(VariedModel& model, int64_t rank, const DeviceMesh& mesh,
             Accumulation accumulation) const {
    auto optimizer = optimizer_of(model);
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      for (int64_t micro = 0; micro < micro_batches(accumulation); ++micro) {
        const bool is_last = micro + 1 == micro_batches(accumulation);
        run_micro_batch(model, tokens_of(model, step, micro, rank), accumulation, is_last);
        const auto after = counters(mesh);
        EXPECT_EQ(resident_bytes(after) + after.post_forward_bytes + after.staging_bytes, 0);
        EXPECT_EQ(after.gradient_bytes > 0, waits_after(accumulation, is_last));
      }
      optimizer.step();
    }
  }

  bool waits_after(Accumulation accumulation, bool is_last) const {
    if (is_last || accumulation == Accumulation::kOff) return false;
    return accumulation == Accumulation::kNoSync || GetParam().is_hybrid();
  }

  void expect_the_unsharded_numbers(int64_t rank, const DeviceMesh& mesh, Parameters kind,
                                    Accumulation accumulation) const {
    VariedModel plain(kind, kDepth), model(kind, kDepth);
    shard(model, mesh, GetParam());
    train(model, rank, mesh, accumulation);
    train_plain(plain, GetParam().ranks(), accumulation);
    const auto expected = plain->parameters(), actual = model->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto difference = (full_value(actual[i]) - expected[i].detach()).abs().max();
      EXPECT_LE(difference.item<double>(), 1e-12) << "parameter " << i;
    }
  }
};

TEST_P(PolicyProduct, HasTheUnshardedNumbersAndLeavesNothingThatDoesNotWait) {
  run_ranks(GetParam().ranks(), [&](int64_t rank) {
    const auto mesh = mesh_of(GetParam());
    for (const auto kind : kAllParameters) {
      for (const auto accumulation : kAllAccumulations) {
        SCOPED_TRACE("parameters " + std::to_string(static_cast<int>(kind)) + ", accumulation " +
                     std::to_string(static_cast<int>(accumulation)));
        expect_the_unsharded_numbers(rank, mesh, kind, accumulation);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, PolicyProduct, ::testing::ValuesIn(all_policies()),
                         [](const auto& info) { return name_of(info.param); });

TEST(PolicyProductElsewhere, AWorldThatDoesNotDivideTheShardsIsRefused) {
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{1}, {3}}) {
    const Policies policies{mesh, ReshardAfterForward::to_world(2)};
    run_ranks(policies.ranks(), [&](int64_t) {
      VariedModel model(Parameters::kEven, kDepth);
      EXPECT_THAT(message_of([&] {
                    fully_shard(model, mesh_of(policies),
                                {.reshard_after_forward = policies.reshard});
                  }),
                  HasSubstr("to_world(2) on " + std::to_string(policies.shards())));
      EXPECT_FALSE(is_fsdp_module(*model));
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
