// Regions that run again in backward, of a tensor-parallel model that is not sharded.
#include "fully_shard/activation_checkpoint.h"
#include "programs/trainer/model/transformer.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

namespace fsdp::testing {
namespace {

constexpr programs::TransformerConfig kRunAgain{
    .vocab = 67, .width = 24, .blocks = 2, .heads = 6, .kv_heads = 6, .max_tokens = 8};

class CheckpointedRegions : public Worlds {};

// What a block sends in forward it sends again, by the same styles.
TEST_P(CheckpointedRegions, GiveTheGradientsOfOneDeviceAndSendWhatAForwardSends) {
  constexpr int64_t kBlocks = kRunAgain.blocks;
  for (const bool cut_sequence : {false, true}) {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto make = [] { return programs::Transformer(kRunAgain); };
      auto plain = drawn(3, make), model = drawn(3, make);
      parallelize_module(model, mesh, transformer_plan(/*head_width=*/4, cut_sequence));
      model->around_block = [](const auto& run, const at::Tensor& x) { return checkpoint(run, x); };
      const at::Tensor tokens = torch::arange(10).view({2, 5});
      transformer_loss(plain->forward(tokens), tokens).backward();
      CountedCollectives counted(mesh);
      const at::Tensor loss = transformer_loss(model->forward(tokens), tokens);
      counted.take();
      loss.backward();
      const CollectiveCounts sums{.all_reduces = 2 * kBlocks + 2 + 2 * kBlocks};
      const CollectiveCounts halves{.all_reduces = 2 + kBlocks,  // norms: by each backward
                                    .all_gathers = 2 * kBlocks + 1 + 2 * kBlocks,
                                    .reduce_scatters = 2 * kBlocks + 1 + 2 * kBlocks};
      EXPECT_EQ(counted.take(), cut_sequence ? halves : sums);
      expect_same_gradients(*model, *plain, kClose);
    });
  }
}

INSTANTIATE_WORLDS(CheckpointedRegions, 2, 3);

}  // namespace
}  // namespace fsdp::testing
