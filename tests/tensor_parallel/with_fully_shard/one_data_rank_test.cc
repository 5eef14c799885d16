// A tensor-parallel model that is sharded over one rank: its parameters are where they
// are, and every step sends what the first sends.
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/sharded_pair.h"

namespace fsdp::testing {
namespace {

constexpr ShardedPair::Config kOneDataRank{
    .vocab = 64, .width = 16, .blocks = 2, .heads = 4, .kv_heads = 4, .max_tokens = 8};

// The norms of each unit are summed together, whatever the step before left behind.
TEST(OneDataRank, SumsTheNormsOfAUnitTogetherInEveryStep) {
  on_pairs(kOneDataRank, 1, 2, /*cut_sequence=*/true, {}, [](ShardedPair& pair) {
    constexpr int64_t kBlocks = kOneDataRank.blocks, kUnits = kBlocks + 1;
    CountedCollectives counted(pair.mesh["tp"]);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = pair.sharded_loss();
      counted.take();
      loss.backward();
      EXPECT_EQ(counted.take(), (CollectiveCounts{.all_reduces = 1 + kUnits,
                                                  .all_gathers = 2 * kBlocks + 1,
                                                  .reduce_scatters = 2 * kBlocks + 1}))
          << step;
      if (step < 2) pair.sharded->zero_grad();
    }
    pair.plain_loss().backward();
    pair.expect_same_gradients();
  });
}

}  // namespace
}  // namespace fsdp::testing
