// A model whose ranks are given different inputs: wrong numbers, unless somebody looks.
#include "device_mesh/debug.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <gmock/gmock.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

struct Checked {
  Checked() { set_debug_options({.check_replicated = true}); }
  ~Checked() { set_debug_options({}); }
};

torch::nn::Sequential cut_mlp(const DeviceMesh& mesh) {
  auto model = drawn(1, [] {
    return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::GELU(),
                                 torch::nn::Linear(8, 6));
  });
  parallelize_module(model, mesh, {{"0", ColwiseParallel{}}, {"2", RowwiseParallel{}}});
  return model;
}

TEST(TensorParallelReplicated, InputsThatDifferAreNamedAndTheNextStepIsClean) {
  const Checked checked;
  on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    auto model = cut_mlp(mesh);
    const at::Tensor input = drawn_tensor(2, {4, 6});
    model->forward(input).sum().backward();
    model->zero_grad();
    const at::Tensor own = rank == 1 ? input * 2 : input;
    EXPECT_THAT(message_of([&] { model->forward(own); }),
                HasSubstr("not the same on all ranks of"));
    auto untouched = cut_mlp(mesh);
    model->forward(input).square().sum().backward();
    untouched->forward(input).square().sum().backward();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(full_gradient(item.value())
                      .equal(full_gradient(untouched->named_parameters()[item.key()])));
  });
}

// Masks, tables and targets meet DTensors without a style.
TEST(TensorParallelReplicated, SoAreWhatElseMeetsActivations) {
  const Checked checked;
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    auto linear = drawn(1, [] { return torch::nn::Linear(6, 8); });
    parallelize_module(linear, mesh, {{"", ColwiseParallel{}}});
    const at::Tensor cut = linear->forward(drawn_tensor(2, {4, 6}));
    EXPECT_THAT(message_of([&] { cut.mul(torch::full({8}, rank + 1.0, torch::kFloat64)); }),
                HasSubstr("aten::mul: a plain tensor beside DTensors is not the same"));
    const at::Tensor targets = torch::arange(4).add(rank);
    EXPECT_THAT(message_of([&] { torch::cross_entropy_loss(cut, targets); }),
                HasSubstr("aten::nll_loss"));
  });
}

}  // namespace
}  // namespace fsdp::testing
