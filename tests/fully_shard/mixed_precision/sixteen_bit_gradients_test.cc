// Gradients of 16-bit types are summed in fp32 and divided before they are rounded.
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

namespace fsdp::testing {
namespace {

class SixteenBitGradients : public Worlds {};

struct ScaledWeight : torch::nn::Module {
  explicit ScaledWeight(at::ScalarType dtype)
      : weight(register_parameter("weight", torch::zeros({5, 3}, dtype))) {}
  // The gradient of every element is `factor`.
  torch::Tensor forward(double factor) { return (weight * factor).sum(); }
  torch::Tensor weight;
};

TEST_P(SixteenBitGradients, OfSixtyThousandInHalfHaveTheMeanSixtyThousand) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<ScaledWeight>(torch::kHalf);
    fully_shard(model, mesh);
    model->forward(60000).backward();
    const auto gradient = full_gradient(model->parameters()[0]);
    EXPECT_EQ(gradient.scalar_type(), torch::kHalf);
    EXPECT_TRUE(torch::equal(gradient, torch::full({5, 3}, 60000, torch::kHalf))) << gradient;
  });
}

TEST_P(SixteenBitGradients, AreDividedByTheFactorBeforeTheyAreRounded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<ScaledWeight>(torch::kHalf);
    fully_shard(model, mesh);
    get_fsdp_module(*model).set_gradient_divide_factor(2.0 * static_cast<double>(mesh.size()));
    model->forward(30000).backward();
    const auto gradient = full_gradient(model->parameters()[0]);
    EXPECT_TRUE(torch::equal(gradient, torch::full({5, 3}, 15000, torch::kHalf))) << gradient;
  });
}

TEST_P(SixteenBitGradients, OfBfloat16AreNotRoundedAtEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = std::make_shared<ScaledWeight>(torch::kBFloat16);
    fully_shard(model, mesh);
    model->forward(rank == 0 ? 256 : 1).backward();  // 256 + 1 is 256 in bfloat16
    const auto mean = static_cast<double>(256 + world() - 1) / static_cast<double>(world());
    EXPECT_TRUE(torch::equal(full_gradient(model->parameters()[0]),
                             torch::full({5, 3}, mean).to(torch::kBFloat16)))
        << full_gradient(model->parameters()[0]);
  });
}

TEST_P(SixteenBitGradients, OfFloatParametersAreDividedInFloat) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<ScaledWeight>(torch::kFloat);
    fully_shard(model, mesh, {.mp_policy = {.reduce_dtype = torch::kHalf}});
    get_fsdp_module(*model).set_gradient_divide_factor(3);
    model->forward(1).backward();
    const auto gradient = full_gradient(model->parameters()[0]);
    EXPECT_TRUE(torch::equal(gradient, torch::full({5, 3}, static_cast<float>(world())) / 3))
        << gradient;
  });
}

INSTANTIATE_WORLDS(SixteenBitGradients, 1, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
