// What each combination of policies holds at its peak, and how that grows with depth.
#include "tests/fully_shard/policies/policies.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fsdp::testing {
namespace {

class PolicyMemory : public ::testing::TestWithParam<Policies> {
 protected:
  // Bytes beyond the shards in a step that repeats, on rank 0.
  int64_t peak(int64_t depth, Accumulation accumulation) const {
    std::atomic<int64_t> bytes{0};
    run_ranks(GetParam().ranks(), [&](int64_t rank) {
      const auto mesh = mesh_of(GetParam());
      VariedModel model(Parameters::kEven, depth);
      shard(model, mesh, GetParam());
      for (int64_t step = 0; step < 3; ++step) {
        reset_peak(mesh);
        for (int64_t micro = 0; micro < micro_batches(accumulation); ++micro)
          run_micro_batch(model, tokens_of(model, step, micro, rank), accumulation,
                          micro + 1 == micro_batches(accumulation));
      }
      if (rank == 0) bytes = counters(mesh).peak_bytes;
    });
    return bytes;
  }

  // A block's unsharded parameters, and as many bytes of gradients.
  static int64_t block_bytes() {
    const VariedModel model(Parameters::kEven, 1);
    int64_t elements = 0;
    for (const auto& parameter : model->blocks[0]->parameters()) elements += parameter.numel();
    return 8 * elements;
  }

  // Of a block that is kept between forward and backward.
  int64_t kept_bytes() const {
    const auto& policies = GetParam();
    if (policies.shards() == 1) return 0;  // borrows the shards
    const VariedModel model(Parameters::kEven, 1);
    const auto& block = *model->blocks[0];
    if (policies.reshard->world()) return row_bytes(block, policies.neighbours());
    return policies.reshard->reshards() ? 0
                                        : policies.shards() * row_bytes(block, policies.shards());
  }

  // Of a block whose gradients wait.
  int64_t waiting_bytes(Accumulation accumulation) const {
    if (accumulation == Accumulation::kNoSync) return block_bytes();
    const bool keeps_sums = accumulation == Accumulation::kShardsOnly && GetParam().is_hybrid();
    return keeps_sums ? block_bytes() / GetParam().shards() : 0;
  }
};

TEST_P(PolicyMemory, GrowsWithDepthByWhatThePoliciesKeep) {
  for (const auto accumulation : kAllAccumulations) {
    SCOPED_TRACE("accumulation " + std::to_string(static_cast<int>(accumulation)));
    const auto shallow = peak(4, accumulation), deep = peak(32, accumulation);
    EXPECT_EQ(deep - shallow, 28 * (kept_bytes() + waiting_bytes(accumulation)));
  }
}

TEST_P(PolicyMemory, StaysWithinTheFormula) {
  constexpr int64_t kDepth = 4;
  const int64_t root = 2 * 12 * 12 * 8, slack = 16 * 1024;  // alignment, stamps and flags
  const auto block = std::max(block_bytes(), root);
  for (const auto accumulation : kAllAccumulations) {
    SCOPED_TRACE("accumulation " + std::to_string(static_cast<int>(accumulation)));
    // Ancestors, two units, their gradients twice, a received row over the shards and one
    // over the replicas, and what is kept.
    const auto received = block / GetParam().shards() * (GetParam().is_hybrid() ? 2 : 1);
    const auto pending = waiting_bytes(accumulation) > 0 ? root : 0;
    EXPECT_LE(peak(kDepth, accumulation),
              2 * root + 4 * block + received + pending +
                  kDepth * (kept_bytes() + waiting_bytes(accumulation)) + slack);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PolicyMemory, ::testing::ValuesIn(all_policies()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace fsdp::testing
