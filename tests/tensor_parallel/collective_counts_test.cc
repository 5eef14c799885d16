// How many collectives a step issues: those of Megatron, no others.
#include "device_mesh/collectives/issue_log.h"
#include "examples/transformer.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/issued_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <ostream>

namespace fsdp::testing {
namespace {

struct Counts {
  int64_t all_reduces = 0, all_gathers = 0, reduce_scatters = 0;
  bool operator==(const Counts&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Counts& counts) {
  return out << counts.all_reduces << " all-reduces, " << counts.all_gathers << " all-gathers, "
             << counts.reduce_scatters << " reduce-scatters";
}

// Since the last call. Reduce-scatters are messages over Gloo: they are what else was
// announced.
class Counter {
 public:
  explicit Counter(const DeviceMesh& mesh) : mesh_(mesh) { take(); }

  Counts take() {
    auto issued = IssuedCollectives::take();
    const int64_t before = std::exchange(announced_, announced());
    Counts counts{.all_reduces = issued["allreduce_"], .all_gathers = issued["_allgather_base_"]};
    counts.reduce_scatters = announced_ - before - counts.all_reduces - counts.all_gathers;
    return counts;
  }

 private:
  int64_t announced() const {
    return internal::IssueLog::of(mesh_, 0)->recent_operations().back().sequence;
  }

  const DeviceMesh& mesh_;
  IssuedCollectives issued_;
  int64_t announced_ = 0;
};

struct StepCounts {
  Counts forward, backward;
};

StepCounts count_step(int64_t blocks, int64_t kv_heads, bool cut_sequence, const DeviceMesh& mesh) {
  const examples::TransformerConfig config{.vocab = 64,
                                           .width = 32,
                                           .blocks = blocks,
                                           .heads = 4,
                                           .kv_heads = kv_heads,
                                           .max_tokens = 8};
  auto model = drawn(3, [&] { return examples::Transformer(config); });
  parallelize_module(model, mesh, transformer_plan(/*head_width=*/8, cut_sequence));
  const at::Tensor tokens = torch::arange(16).view({2, 8});
  Counter counter(mesh);
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
      EXPECT_EQ(counts.forward, (Counts{.all_reduces = 2 * blocks + 1, .all_gathers = 1}));
      EXPECT_EQ(counts.backward, (Counts{.all_reduces = 2 * blocks + 2}));
    });
  }
}

// One all-reduce of a backward is the log-softmax's, the other sums all norms' gradients.
TEST(TensorParallelCounts, AreMegatronsWithTheSequenceCut) {
  for (const int64_t blocks : {1, 3}) {
    on_ranks_of(2, [&](int64_t, const DeviceMesh& mesh) {
      const auto counts = count_step(blocks, 4, /*cut_sequence=*/true, mesh);
      EXPECT_EQ(counts.forward,
                (Counts{.all_gathers = 2 * blocks + 2, .reduce_scatters = 2 * blocks + 1}));
      EXPECT_EQ(counts.backward, (Counts{.all_reduces = 2,
                                         .all_gathers = 2 * blocks + 1,
                                         .reduce_scatters = 2 * blocks + 1}));
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
