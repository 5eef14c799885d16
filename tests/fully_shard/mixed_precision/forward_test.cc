// forward() casts inputs and outputs where a module is called.
#include "fully_shard/forward.h"

#include "tests/fully_shard/support/mixed_precision.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

struct Features {
  std::map<std::string, torch::Tensor> by_name;
  std::array<torch::Tensor, 2> pair;
};

struct Batch {
  torch::Tensor inputs;
  Features features;
  torch::OrderedDict<std::string, torch::Tensor> more;
  int64_t length = 0;
};

}  // namespace
}  // namespace fsdp::testing

template <>
struct fsdp::TensorFields<fsdp::testing::Features> {
  static auto of(testing::Features& features) { return std::tie(features.by_name, features.pair); }
};
template <>
struct fsdp::TensorFields<fsdp::testing::Batch> {
  static auto of(testing::Batch& batch) {
    return std::tie(batch.inputs, batch.features, batch.more);
  }
};

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

struct TakesBatchImpl : torch::nn::Module {
  Batch forward(Batch batch) {
    seen = batch;
    batch.inputs = linear(batch.inputs) * static_cast<double>(batch.length);
    return batch;
  }
  Batch seen;
  torch::nn::Linear linear = register_module("linear", make_linear(4, 4));
};
TORCH_MODULE(TakesBatch);

void expect_floating_tensors_in(at::ScalarType dtype, const Batch& batch) {
  EXPECT_EQ(batch.inputs.scalar_type(), dtype);
  EXPECT_EQ(batch.features.by_name.at("weights").scalar_type(), dtype);
  EXPECT_EQ(batch.features.by_name.at("ids").scalar_type(), at::kLong);
  EXPECT_EQ(batch.features.pair[1].scalar_type(), dtype);
  EXPECT_EQ(batch.more["mask"].scalar_type(), dtype);
  EXPECT_EQ(batch.length, 3);
}

TEST_P(PrecisionAtTheBoundary, ForwardFindsTensorsInStructsAndMaps) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    TakesBatch model;
    fully_shard(model, mesh,
                {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble}});
    Batch batch;
    batch.inputs = input_of(rank);
    batch.features.by_name = {{"weights", torch::ones({2})}, {"ids", torch::arange(2)}};
    batch.features.pair = {torch::arange(2), torch::ones({2})};
    batch.more.insert("mask", torch::ones({2}));
    batch.length = 3;
    const auto output = forward(model, batch);
    expect_floating_tensors_in(at::kBFloat16, model->seen);
    expect_floating_tensors_in(at::kDouble, output);
    EXPECT_EQ(batch.inputs.scalar_type(), at::kFloat) << "the caller's own stays";
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
