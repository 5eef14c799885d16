// Ranks of one tensor-parallel group that are given different batches learn it in the
// first step; later steps compare nothing.
#include "examples/transformer.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <gmock/gmock.h>

#include <string>

namespace fsdp::testing {
namespace {

using examples::Transformer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr examples::TransformerConfig kModelOfInputs{
    .vocab = 64, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 4, .max_tokens = 8};

Transformer parallel_transformer(const DeviceMesh& mesh) {
  auto model = drawn(3, [] { return Transformer(kModelOfInputs); });
  parallelize_module(model, mesh, transformer_plan(/*head_width=*/4, /*cut_sequence=*/false));
  return model;
}

at::Tensor batch(int64_t number) { return (torch::arange(16).view({2, 8}) + number) % 64; }

TEST(FirstInputs, ThatDifferNameModuleOperandAndRanksAndTheNextStepIsClean) {
  on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    auto model = parallel_transformer(mesh);
    const auto named = AllOf(HasSubstr("module 'embedding'"), HasSubstr("'embedding.weight'"),
                             HasSubstr("operand 'indices'"), HasSubstr("on rank 0 and on rank 2"),
                             HasSubstr("must be given the same batch"));
    expect_error<c10::ValueError>([&] { model->forward(batch(rank == 2 ? 1 : 0)); }, named);
    const at::Tensor loss = transformer_loss(model->forward(batch(0)), batch(0));
    loss.backward();
    auto untouched = parallel_transformer(mesh);
    transformer_loss(untouched->forward(batch(0)), batch(0)).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(full_gradient(item.value())
                      .equal(full_gradient(untouched->named_parameters()[item.key()])));
  });
}

// The rank of the job where the data-parallel coordinate is meant.
TEST(FirstInputs, ThatDifferWithinAGroupAreAnErrorAndBetweenGroupsAreNone) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    auto model = parallel_transformer(mesh["tp"]);
    for (auto& block : model->blocks) fully_shard(*block, mesh["dp"]);
    fully_shard(*model, mesh["dp"]);
    expect_error<c10::ValueError>([&] { model->forward(batch(mesh["dp"].rank())); },
                                  HasSubstr("mesh[\"dp\"].local_rank()"));
    const at::Tensor tokens = batch(mesh["dp"].local_rank());
    transformer_loss(model->forward(tokens), tokens).backward();
  });
}

TEST(FirstInputs, ThatDifferAreFoundWithoutGradientsToo) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto model = parallel_transformer(mesh);
    EXPECT_THAT(message_of([&] { model->forward(batch(rank)); }), HasSubstr("'embedding'"));
  });
}

// Another number of tokens, and real numbers.
TEST(FirstInputs, OfOtherShapesOrNumbersDiffer) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto linear = drawn(1, [] { return Linear(6, 6); });
    parallelize_module(linear, mesh, {{"", ColwiseParallel{}}});
    EXPECT_THAT(message_of([&] {
                  linear->forward(drawn_tensor(2, {4 + rank, 6}));
                }),
                HasSubstr("operand 'mat1'"));
    EXPECT_THAT(message_of([&] {
                  linear->forward(drawn_tensor(2 + rank, {4, 6}));
                }),
                HasSubstr("operand 'mat1'"));
  });
}

// Machines that round otherwise compute activations otherwise.
TEST(FirstInputs, ThatDifferByRoundingAreTheSame) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto linear = drawn(1, [] { return Linear(6, 6); });
    parallelize_module(linear, mesh, {{"", ColwiseParallel{}}});
    const at::Tensor x = drawn_tensor(2, {4, 6});
    linear->forward(rank == 1 ? x * (1 + 1e-12) : x).sum().backward();
  });
}

TEST(FirstInputs, AreComparedUntilAStepHasPassed) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto model = parallel_transformer(mesh);
    CountedCollectives counted(mesh);
    const auto collectives_of_step = [&] {
      counted.take();
      transformer_loss(model->forward(batch(0)), batch(0)).backward();
      const CollectiveCounts counts = counted.take();
      return counts.all_reduces + counts.all_gathers + counts.reduce_scatters;
    };
    const int64_t first = collectives_of_step(), second = collectives_of_step();
    EXPECT_GT(first, second);
    EXPECT_EQ(collectives_of_step(), second);
  });
}

}  // namespace
}  // namespace fsdp::testing
