// Errors name the way out of what strangers' programs do.
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <memory>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

torch::Tensor loss_of(Pair& model) { return model(torch::ones({2, 4})).pow(2).sum(); }

class WaysOut : public Worlds {};

// A constructor may have made it: it gets the entries, and trains them.
TEST_P(WaysOut, OfAnOptimizerThatWasBuiltTooEarly) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair plain, model;
    for (auto* each : {&plain, &model}) set_start_values(**each);
    torch::optim::SGD expected(plain->parameters(), 0.1), optimizer(model->parameters(), 0.1);
    fully_shard(model, mesh);
    loss_of(model).backward();
    const char* line = "optimizer.param_groups()[0].params() = module->parameters()";
    EXPECT_THAT(message_of([&] { optimizer.step(); }), HasSubstr(line));
    optimizer.param_groups()[0].params() = model->parameters();
    loss_of(plain).backward();
    optimizer.step();
    expected.step();
    EXPECT_TRUE(full_value(model->parameters()[0]).allclose(plain->first->weight));
  });
}

TEST_P(WaysOut, OfReadingTheGradientOfAMember) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model;
    set_start_values(*model);
    fully_shard(model, mesh);
    loss_of(model).backward();
    EXPECT_THAT(message_of([&] { model->first->weight.grad().norm().item<float>(); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("read them there"),
                      HasSubstr("fsdp::DTensor(parameter.grad()).full_tensor()")));
  });
}

TEST_P(WaysOut, OfAPointerIntoAMember) {
  if (world() == 1) return;  // the member is the shard
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model;
    set_start_values(*model);
    fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { model->first->weight.data_ptr<float>(); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("fsdp::Unsharded")));
  });
}

TEST_P(WaysOut, OfStartValuesThatDiffer) {
  if (world() == 1) return;
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Pair model;
    set_start_values(*model);
    {
      const torch::NoGradGuard no_grad;
      model->first->weight.add_(static_cast<double>(rank));
    }
    fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { loss_of(model); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("fsdp::broadcast_states")));
  });
}

// An encoder that two models use: a unit of its own, and both train it.
TEST_P(WaysOut, OfASubModuleThatTwoUnitsShare) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [](const Pair& shared) {
      auto user = std::make_shared<torch::nn::Module>();
      user->register_module("shared", shared.ptr());
      user->register_module("own", make_linear(4, 4).ptr());
      return user;
    };
    Pair shared;
    const auto one = make(shared), other = make(shared);
    fully_shard(*one, mesh);
    EXPECT_THAT(message_of([&] { fully_shard(*other, mesh); }),
                AllOf(HasSubstr("'shared.first.weight'"), HasSubstr("bottom-up"),
                      HasSubstr("make the shared sub-module a unit of its own")));
    Pair first;
    set_start_values(*first);
    const auto a = make(first), b = make(first);
    fully_shard(first, mesh);
    fully_shard(*a, mesh);
    fully_shard(*b, mesh);
    loss_of(first).backward();
    EXPECT_TRUE(a->parameters()[0].is_same(b->parameters()[0]));
    EXPECT_TRUE(b->parameters()[0].grad().defined());
  });
}

INSTANTIATE_WORLDS(WaysOut, 1, 2);

TEST(WaysOutOf, ADTensorThatNoUnitMade) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("w", distribute_tensor(torch::ones({4}), mesh, {Shard{0}}));
    EXPECT_THAT(message_of([&] { fully_shard(*module, mesh); }),
                AllOf(HasSubstr("'w'"), HasSubstr("full_tensor()")));
  });
}

}  // namespace
}  // namespace fsdp::testing
