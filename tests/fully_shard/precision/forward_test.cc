// forward() casts inputs and outputs where a module is called.
#include "fully_shard/forward.h"

#include "tests/fully_shard/precision/mixed_precision.h"

#include <gtest/gtest.h>

#include <optional>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class PrecisionAtTheBoundary : public Worlds {};

TEST_P(PrecisionAtTheBoundary, ForwardCastsAtTheBoundary) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat});
    EXPECT_EQ(model(input_of(rank)).scalar_type(), at::kBFloat16);
    const auto output = forward(model, input_of(rank));
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    output.sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kFloat);
    const torch::nn::Linear plain(4, 2);
    EXPECT_EQ(forward(plain, input_of(rank)).scalar_type(), at::kFloat) << "no unit: as it is";
  });
}

struct PairsImpl : torch::nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const std::vector<Tensor>& xs,
                                                  const std::optional<Tensor>& mask, int64_t n) {
    for (const auto& x : xs) dtypes.push_back(x.scalar_type());
    dtypes.push_back(mask->scalar_type());
    return {linear(xs[0]) * n, {torch::arange(3), linear(xs[1])}};
  }
  std::vector<at::ScalarType> dtypes;
  torch::nn::Linear linear = register_module("linear", make_linear(4, 4));
};
TORCH_MODULE(Pairs);

TEST_P(PrecisionAtTheBoundary, ForwardFindsTensorsInContainers) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Pairs model;
    fully_shard(model, mesh,
                {.mp_policy = {.param_dtype = at::kHalf, .output_dtype = at::kDouble}});
    const auto x = input_of(rank);
    const auto [sum, list] = forward(model, std::vector<Tensor>{x, x},
                                     std::optional<Tensor>(torch::ones({2})), int64_t{2});
    EXPECT_EQ(model->dtypes, std::vector<at::ScalarType>(3, at::kHalf));
    EXPECT_EQ(sum.scalar_type(), at::kDouble);
    EXPECT_EQ(list[0].scalar_type(), at::kLong);
    EXPECT_EQ(list[1].scalar_type(), at::kDouble);
  });
}

struct KeepsInputImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    input = x;
    return linear(x);
  }
  Tensor input;
  torch::nn::Linear linear = register_module("linear", make_linear(4, 4));
};
TORCH_MODULE(KeepsInput);

TEST_P(PrecisionAtTheBoundary, ForwardPassesOnTheTensorThatIsAsItShouldBe) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    KeepsInput model;
    fully_shard(model, mesh, {.mp_policy = {.param_dtype = at::kFloat}});
    const auto x = input_of(rank);
    forward(model, x);
    EXPECT_TRUE(model->input.is_same(x));
  });
}

INSTANTIATE_WORLDS(PrecisionAtTheBoundary, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
