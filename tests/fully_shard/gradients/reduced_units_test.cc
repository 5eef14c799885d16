// Which units a backward reduces: those whose reduction is pending, and no others.
#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <vector>

namespace fsdp::testing {
namespace {

class Owing : public Worlds {};

int64_t reductions(const DeviceMesh& mesh, const torch::Tensor& loss) {
  return traffic_of(mesh, [&] { loss.backward(); }).reduce_scatters;
}

TEST_P(Owing, ABackwardWithoutSynchronisationMakesAUnitOweAnew) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const auto x = torch::ones({1, 4});
    const auto kept = model->first(x).sum();
    kept.backward({}, /*retain_graph=*/true);
    const auto one = full_gradient(model->first->parameters()[0]);
    {
      const NoSyncGuard guard(get_fsdp_module(*model));
      EXPECT_EQ(reductions(mesh, kept), 0);  // the same graph again: no forward touched it
    }
    EXPECT_EQ(reductions(mesh, model->second(x).sum()), 2);
    EXPECT_TRUE(torch::allclose(full_gradient(model->first->parameters()[0]), 2 * one));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(Owing, AFrozenUnitThatTookPartOwesNothingOnceItIsTrained) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const auto x = torch::ones({1, 4}, torch::requires_grad());
    for (auto& parameter : model->first->parameters()) parameter.set_requires_grad(false);
    EXPECT_EQ(reductions(mesh, model->second(model->first(x)).sum()), 1);
    for (auto& parameter : model->first->parameters()) parameter.set_requires_grad(true);
    EXPECT_EQ(reductions(mesh, model->second(x).sum()), 1);
  });
}

TEST_P(Owing, WhatWaitsIsReducedThoughItsParameterIsFrozenMeanwhile) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    const auto x = torch::ones({1, 4});
    model->first(x).sum().backward();
    const auto one = full_gradient(model->first->parameters()[0]);
    model->zero_grad();
    {
      const NoSyncGuard guard(get_fsdp_module(*model));
      model->first(x).sum().backward();
    }
    for (auto& parameter : model->first->parameters()) parameter.set_requires_grad(false);
    EXPECT_EQ(reductions(mesh, model->second(x).sum()), 2);
    const auto gradient = full_gradient(model->first->parameters()[0]);
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(torch::equal(gradient, one));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// A weight of its own that is used before and after the layers below it.
struct AroundImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = first(torch::tanh(own(x)));
    return own(torch::tanh(second(torch::tanh(x))));
  }
  torch::nn::Linear own = register_module("own", make_linear(4, 4)),
                    first = register_module("first", make_linear(4, 4)),
                    second = register_module("second", make_linear(4, 4));
};
TORCH_MODULE(Around);

TEST_P(Owing, AnAncestorsUseAtTheEndOfForwardHurriesNobody) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Around model;
    fully_shard(model->first, mesh);
    fully_shard(model->second, mesh);
    fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      const auto loss = model(torch::ones({1, 4})).sum();
      EXPECT_EQ(reductions(mesh, loss), 3) << step;
    }
    EXPECT_EQ(counters(mesh).late_reduce_scatters, 0);
  });
}

TEST(OwingAlone, TheDivideFactorHoldsForOneRankToo) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = sharded(Pair(), mesh);
    get_fsdp_module(*model->first).set_gradient_divide_factor(4);
    const auto x = torch::ones({1, 4});
    EXPECT_EQ(reductions(mesh, model->first(x).sum() + model->second(x).sum()), 0);
    EXPECT_TRUE(torch::equal(4 * full_gradient(model->first->parameters()[0]),
                             full_gradient(model->second->parameters()[0])));
  });
}

INSTANTIATE_WORLDS(Owing, 2, 3);

}  // namespace
}  // namespace fsdp::testing
