// set_reduce_scatter_unused_params: gradients for what nobody used.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class UnusedParams : public Worlds {};

struct PartlyUsedImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return always(x); }
  torch::nn::Linear always = register_module("always", make_linear(3, 4));
  torch::nn::Linear never = register_module("never", make_linear(3, 4));  // a unit of its own
  torch::nn::Linear beside = register_module("beside", make_linear(3, 2));
};
TORCH_MODULE(PartlyUsed);

PartlyUsed with_unused_params(const DeviceMesh& mesh) {
  PartlyUsed model;
  fully_shard(model->never, mesh);
  fully_shard(model, mesh);
  return model;
}

int64_t reductions_of_a_step(PartlyUsed& model, const DeviceMesh& mesh) {
  model->zero_grad();
  return traffic_of(mesh, [&] { model(torch::ones({1, 3})).sum().backward(); }).reduce_scatters;
}

bool is_all_zeros(const Tensor& gradient) { return !gradient.any().item<bool>(); }

TEST_P(UnusedParams, GetZerosAndTheirUnitsAreReduced) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = with_unused_params(mesh);
    const int64_t one = world() > 1 ? 1 : 0;
    EXPECT_EQ(reductions_of_a_step(model, mesh), one);
    EXPECT_FALSE(model->never->parameters()[0].grad().defined());
    EXPECT_FALSE(model->beside->parameters()[0].grad().defined());
    auto root = get_fsdp_module(*model);
    root.set_reduce_scatter_unused_params(true);
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(reductions_of_a_step(model, mesh), 2 * one);
      for (auto& parameter : model->never->parameters())
        EXPECT_TRUE(is_all_zeros(full_gradient(parameter)));
      EXPECT_TRUE(is_all_zeros(full_gradient(model->beside->parameters()[0])));
      EXPECT_FALSE(is_all_zeros(full_gradient(model->always->parameters()[0])));
    }
    root.set_reduce_scatter_unused_params(false);
    EXPECT_EQ(reductions_of_a_step(model, mesh), one);
    EXPECT_FALSE(model->never->parameters()[0].grad().defined());
  });
}

TEST_P(UnusedParams, OfOneUnitAlone) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = with_unused_params(mesh);
    get_fsdp_module(*model).set_reduce_scatter_unused_params(true, /*recurse=*/false);
    EXPECT_EQ(reductions_of_a_step(model, mesh), world() > 1 ? 1 : 0);
    EXPECT_TRUE(model->beside->parameters()[0].grad().defined());
    EXPECT_FALSE(model->never->parameters()[0].grad().defined());
  });
}

TEST_P(UnusedParams, FrozenOnesGetNothing) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = with_unused_params(mesh);
    get_fsdp_module(*model).set_reduce_scatter_unused_params(true);
    for (auto& parameter : model->never->parameters()) parameter.set_requires_grad(false);
    EXPECT_EQ(reductions_of_a_step(model, mesh), world() > 1 ? 1 : 0);
    EXPECT_FALSE(model->never->parameters()[0].grad().defined());
  });
}

INSTANTIATE_WORLDS(UnusedParams, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
