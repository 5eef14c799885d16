// How many collectives a step issues: those of Megatron, no others. The first step
// compares the ranks' inputs, too (first_inputs_test.cc).
#include "programs/trainer/model/transformer.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

namespace fsdp::testing {
namespace {

StepCounts count_step(int64_t blocks, int64_t kv_heads, bool cut_sequence, const DeviceMesh& mesh) {
  const programs::TransformerConfig config{.vocab = 64,
                                           .width = 32,
                                           .blocks = blocks,
                                           .heads = 4,
                                           .kv_heads = kv_heads,
                                           .max_tokens = 8};
  auto model = drawn(3, [&] { return programs::Transformer(config); });
  parallelize_module(model, mesh, transformer_plan(/*head_width=*/8, cut_sequence));
  const at::Tensor tokens = torch::arange(16).view({2, 8});
  transformer_loss(model->forward(tokens), tokens).backward();
  model->zero_grad();
  CountedCollectives counter(mesh);
  const at::Tensor loss = transformer_loss(model->forward(tokens), tokens);
  StepCounts counts{.forward = counter.take(), .backward = {}};
  loss.backward();
  counts.backward = counter.take();
  return counts;
}

TEST(TensorParallelCounts, AreMegatronsWithPlainSequences) {
  for (const int64_t blocks : {1, 3}) {
    on_ranks_of(2, [&](int64_t, const DeviceMesh& mesh) {
      const auto counts = count_step(blocks, 4, /*cut_sequence=*/false, mesh);
      EXPECT_EQ(counts.forward,
                (CollectiveCounts{.all_reduces = 2 * blocks + 1, .all_gathers = 1}));
      EXPECT_EQ(counts.backward, (CollectiveCounts{.all_reduces = 2 * blocks + 2}));
    });
  }
}

// One all-reduce of a backward is the log-softmax's, the other sums all norms' gradients.
TEST(TensorParallelCounts, AreMegatronsWithTheSequenceCut) {
  for (const int64_t blocks : {1, 3}) {
    on_ranks_of(2, [&](int64_t, const DeviceMesh& mesh) {
      const auto counts = count_step(blocks, 4, /*cut_sequence=*/true, mesh);
      EXPECT_EQ(counts.forward, (CollectiveCounts{.all_gathers = 2 * blocks + 2,
                                                  .reduce_scatters = 2 * blocks + 1}));
      EXPECT_EQ(counts.backward, (CollectiveCounts{.all_reduces = 2,
                                                   .all_gathers = 2 * blocks + 1,
                                                   .reduce_scatters = 2 * blocks + 1}));
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
