// Tensor::set_data on tensor-parallel parameters.
#include "dtensor/dtensor.h"
#include "tensor_parallel/communication_log.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <gmock/gmock.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

class ParallelSetData : public Worlds {};

TEST_P(ParallelSetData, OfWhatDoesNotLieAlikeIsRefusedByNameAndChangesNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = drawn(1, [] { return torch::nn::Sequential(Linear(6, 6)); });
    parallelize_module(model, mesh, {{"0", ColwiseParallel{}}});
    at::Tensor weight = model[0]->as<Linear>()->weight;
    const at::Tensor before = full_value(weight), x = drawn_tensor(2, {4, 6});
    const auto refused = [&](const at::Tensor& from) {
      return message_of<c10::ValueError>([&] { weight.set_data(from); });
    };
    EXPECT_THAT(refused(torch::ones({6, 6}, torch::kFloat64)),
                AllOf(HasSubstr("parameter '0.weight'"), HasSubstr("copy_()")));
    EXPECT_THAT(refused(distribute_tensor(before, mesh, {Shard{1}})),
                AllOf(HasSubstr("parameter '0.weight'"), HasSubstr("it must lie alike")));
    at::Tensor other = torch::ones({6, 6}, torch::kFloat64);
    EXPECT_THAT(message_of([&] { other.set_data(weight); }), HasSubstr("Module::clone"));
    EXPECT_FALSE(is_dtensor(other));
    EXPECT_TRUE(full_value(weight).equal(before));
    model->forward(x).square().sum().backward();
    EXPECT_TRUE(is_dtensor(weight.grad()));
    weight.data().copy_(torch::ones({6, 6}, torch::kFloat64));
    EXPECT_TRUE(full_value(weight).equal(torch::ones({6, 6}, torch::kFloat64)));
  });
}

// Module::to(dtype) sets the data of each parameter.
TEST_P(ParallelSetData, OfAnotherDtypeKeepsStylesAndGradients) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return torch::nn::Sequential(Linear(6, 8), Linear(8, 6)); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"0", ColwiseParallel{}}, {"1", RowwiseParallel{}}});
    plain->to(torch::kFloat32);
    parallel->to(torch::kFloat32);
    const RedistributionPolicy policy(Redistribution::kExplicit);
    const at::Tensor x = drawn_tensor(2, {4, 6}).to(torch::kFloat32);
    const at::Tensor wanted = plain->forward(x), found = parallel->forward(x);
    EXPECT_FALSE(is_dtensor(found));  // the row-wise style gives its result whole
    EXPECT_LE(distance(found.detach(), wanted.detach()), 1e-5);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, 1e-5);
  });
}

INSTANTIATE_WORLDS(ParallelSetData, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
