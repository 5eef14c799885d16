// Ranks of one tensor-parallel group that are given different batches learn it in the
// first step; later steps compare nothing.
#include "fully_shard/fully_shard.h"
#include "programs/trainer/model/transformer.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using programs::Transformer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr programs::TransformerConfig kModelOfInputs{
    .vocab = 64, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 4, .max_tokens = 8};

Transformer parallel_transformer(const DeviceMesh& mesh) {
  auto model = drawn(3, [] { return Transformer(kModelOfInputs); });
  parallelize_module(model, mesh, transformer_plan(/*head_width=*/4, /*cut_sequence=*/false));
  return model;
}

at::Tensor batch(int64_t number) { return (torch::arange(16).view({2, 8}) + number) % 64; }

// Its results are cut.
Linear cut_linear(const DeviceMesh& mesh) {
  auto linear = drawn(1, [] { return Linear(6, 8); });
  parallelize_module(linear, mesh, {{"", ColwiseParallel{}}});
  return linear;
}

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

// Masks hold infinities, and a run that diverged NaNs.
TEST(FirstInputs, ThatAreNotFiniteAlikeDifferByRoundingOnlyInTheOthers) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const double inf = std::numeric_limits<double>::infinity();
    const at::Tensor x = drawn_tensor(2, {4, 6});
    const auto forward_with = [&](double own, double last) {
      auto linear = drawn(1, [] { return Linear(6, 6); });
      parallelize_module(linear, mesh, {{"", ColwiseParallel{}}});
      at::Tensor read = x.clone();
      read[0][0] = own;
      read[3][5] = last;
      linear->forward(read);
    };
    const double one = rank == 1 ? std::nextafter(1.0, 2.0) : 1.0;
    EXPECT_NO_THROW(forward_with(inf, one));
    EXPECT_NO_THROW(forward_with(-inf, one));
    EXPECT_NO_THROW(forward_with(std::nan(""), one));
    const double far = rank == 1 ? 90.0 : 1.0;
    EXPECT_THAT(message_of([&] { forward_with(inf, far); }), HasSubstr("'mat1'"));
    for (const double other : {0.0, -inf, std::nan("")}) {
      EXPECT_THAT(message_of([&] { forward_with(rank == 1 ? other : inf, 1.0); }),
                  HasSubstr("'mat1'"));
    }
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

// Targets, masks, factors and indices meet what was computed, not the parameters.
TEST(FirstInputs, BesideActivationsThatDifferNameOperatorOperandAndCoordinates) {
  on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    auto linear = cut_linear(mesh);
    const at::Tensor cut = linear->forward(drawn_tensor(2, {4, 6}));
    const int64_t own = rank == 2 ? 1 : 0;
    const at::Tensor rows = (torch::arange(4) + own) % 4;
    const at::Tensor factors = torch::full({8}, 1.0 + static_cast<double>(own), torch::kFloat64);
    const std::vector<std::pair<std::string, std::function<void()>>> cases = {
        {"aten::cross_entropy_loss: its operand 'target', a plain tensor of shape [4]",
         [&] { torch::cross_entropy_loss(cut, rows); }},
        {"aten::masked_fill: its operand 'mask', a plain tensor of shape [4, 1]",
         [&] {
           cut.masked_fill((rows == 0).view({4, 1}), 0);
         }},
        {"aten::mul: its operand 'other', a plain tensor of shape [8]", [&] { cut.mul(factors); }},
        {"aten::mul: its operand 'other', a plain tensor of shape [1]",
         [&] { cut.mul(factors.narrow(0, 0, 1)); }},
        {"aten::cat: its operand 'tensors', a plain tensor of shape [1, 8]",
         [&] {
           torch::cat({cut, factors.view({1, 8})});
         }},
        {"aten::index_select: its operand 'index', a plain tensor of shape [4]",
         [&] { cut.index_select(0, rows); }},
        {"aten::matmul: its operand 'other', a plain tensor of shape [8]",
         [&] { cut.matmul(factors); }}};
    for (const auto& [text, run] : cases) {
      expect_error<c10::ValueError>(
          run, AllOf(HasSubstr(text), HasSubstr("on coordinate 0 (rank 0) and on coordinate 2"),
                     HasSubstr("(rank " + std::to_string(rank) + ";")));
    }
    EXPECT_NO_THROW(cut.mul(torch::arange(8, torch::kFloat64)).sum());
  });
}

TEST(FirstInputs, BesideActivationsAreThoseOfOneGroupAndOfTheFirstStep) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    auto linear = cut_linear(mesh["tp"]);
    const at::Tensor x = drawn_tensor(2, {4, 6});
    const auto train = [&](int64_t target) {
      torch::cross_entropy_loss(linear->forward(x), torch::full({4}, target)).backward();
    };
    EXPECT_THAT(message_of([&] { train(rank); }), HasSubstr("'target'"));
    EXPECT_NO_THROW(train(mesh["dp"].local_rank()));
    EXPECT_NO_THROW(train(rank));
  });
}

// Nor what it keeps for itself of what was computed.
TEST(FirstInputs, WhatARankLooksAtByItselfIsNotCompared) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto linear = cut_linear(mesh);
    const at::Tensor cut = linear->forward(drawn_tensor(2, {4, 6}));
    const at::Tensor own = torch::full({4, 8}, 1.0 + static_cast<double>(rank), torch::kFloat64);
    CountedCollectives counted(mesh);
    if (rank == 0) cut.detach().mul(own);
    if (rank == 1) {
      const torch::NoGradGuard no_grad;
      cut.mul(own);
    }
    DTensor(cut).to_local().mul(own.narrow(1, 0, 4)).sum();
    EXPECT_EQ(counted.take(), CollectiveCounts{});
    EXPECT_NO_THROW(own.clone().add_(cut));
  });
}

}  // namespace
}  // namespace fsdp::testing
