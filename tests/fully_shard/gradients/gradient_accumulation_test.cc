// Gradients without synchronisation: who reduces, when, and what waits meanwhile.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

namespace fsdp::testing {
namespace {

class GradientSyncEffects : public Worlds {};

int64_t bytes_of(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += 4 * parameter.numel();
  return bytes;
}

bool no_gradients(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) return false;
  }
  return true;
}

TEST_P(GradientSyncEffects, TheEndOfAnInnerGuardDoesNotEndTheOuterOne) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    const auto reductions = [&] {
      decoder.forward();
      return decoder.backward().reduce_scatters;
    };
    {
      NoSyncGuard outer(decoder.root());
      EXPECT_EQ(reductions(), 0);
      {
        NoSyncGuard inner(decoder.root());
        EXPECT_EQ(reductions(), 0);
      }
      EXPECT_EQ(reductions(), 0);
      { NoSyncGuard inner(decoder.block(0)); }
      EXPECT_EQ(reductions(), 0);
    }
    EXPECT_TRUE(no_gradients(*decoder.model));
    EXPECT_EQ(reductions(), kUnits);
    const auto sum = full_gradient(decoder.model->blocks[1]->up->named_parameters()["weight"]);
    decoder.model->zero_grad();
    EXPECT_EQ(reductions(), kUnits);
    const auto one = full_gradient(decoder.model->blocks[1]->up->named_parameters()["weight"]);
    EXPECT_TRUE(torch::allclose(sum, 5 * one, 1e-4, 1e-7)) << (sum - 5 * one).abs().max();
  });
}

TEST_P(GradientSyncEffects, AnExceptionEndsTheGuard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    try {
      NoSyncGuard guard(decoder.root());
      decoder.forward();
      decoder.backward();
      throw std::runtime_error("in between");
    } catch (const std::runtime_error&) {
    }
    decoder.forward();
    EXPECT_EQ(decoder.backward().reduce_scatters, kUnits);
  });
}

TEST_P(GradientSyncEffects, AUnitSwitchedOffByHandIsStillOffAfterAGuard) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& block = *decoder.model->blocks[1];
    decoder.block(1).set_requires_gradient_sync(false, /*recurse=*/false);
    { NoSyncGuard guard(decoder.root()); }
    decoder.forward();
    EXPECT_EQ(decoder.backward().reduce_scatters, kUnits - 1);
    EXPECT_TRUE(no_gradients(block));
    EXPECT_GE(counters(mesh).gradient_bytes, bytes_of(block));
    EXPECT_LT(counters(mesh).gradient_bytes, 2 * bytes_of(block));
    decoder.block(1).set_requires_gradient_sync(true, false);
    decoder.forward();
    EXPECT_EQ(decoder.backward().reduce_scatters, kUnits);
    EXPECT_FALSE(no_gradients(block));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

TEST_P(GradientSyncEffects, GradientsThatWaitAreCounted) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    {
      NoSyncGuard guard(decoder.root());
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        decoder.forward();
        decoder.backward();
        EXPECT_GE(counters(mesh).gradient_bytes, bytes_of(*decoder.model)) << micro_batch;
        EXPECT_LT(counters(mesh).gradient_bytes, 2 * bytes_of(*decoder.model)) << micro_batch;
      }
    }
    reset_peak(mesh);
    EXPECT_GE(counters(mesh).peak_bytes, bytes_of(*decoder.model));
    decoder.root().zero_pending_gradients();
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// Ranks tell each other in the same row which parameters were used.
TEST_P(GradientSyncEffects, AFactorBeyondTheDtypeLeavesZerosAndNotNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.block(1).set_gradient_divide_factor(1e60);
    decoder.forward();
    decoder.backward();
    const auto weight = decoder.model->blocks[1]->up->named_parameters()["weight"];
    const auto gradient = full_gradient(weight);
    EXPECT_TRUE(gradient.equal(torch::zeros_like(gradient)));
  });
}

TEST_P(GradientSyncEffects, GradientsThatWaitDieWithTheirModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder witness(mesh);
    {
      MeasuredDecoder decoder(mesh);
      NoSyncGuard guard(decoder.root());
      decoder.forward();
      decoder.backward();
      EXPECT_GE(counters(mesh).gradient_bytes, bytes_of(*decoder.model));
    }
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

struct TwoLayers : torch::nn::Module {
  torch::nn::Linear a =
      register_module("a", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
  torch::nn::Linear b =
      register_module("b", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
};

std::shared_ptr<TwoLayers> two_layers(const DeviceMesh& mesh) {
  auto model = std::make_shared<TwoLayers>();
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(0.5);
  }
  fully_shard(model->a, mesh);
  fully_shard(model->b, mesh);
  fully_shard(model, mesh);
  return model;
}

// Suspected: rank 0 alone would reduce it, since nothing of it arrived elsewhere.
TEST_P(GradientSyncEffects, AGradientThatWaitsOnOneRankIsReducedByAll) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto model = two_layers(mesh);
    const auto x = torch::ones({1, 4});
    {
      NoSyncGuard guard(get_fsdp_module(*model));
      auto a = model->a(x);  // every rank touches it, and only rank 0 differentiates it
      (model->b(x).sum() + (rank == 0 ? a : a.detach()).sum()).backward();
    }
    const auto traffic = traffic_of(mesh, [&] { model->b(x).sum().backward(); });
    EXPECT_EQ(traffic.reduce_scatters, 2);  // a, which this backward does not touch, too
    const auto gradient = full_gradient(model->a->parameters()[0]);
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(torch::allclose(gradient, torch::full({4, 4}, 1.0 / static_cast<double>(world()))));
    EXPECT_TRUE(
        torch::allclose(full_gradient(model->b->parameters()[0]), torch::full({4, 4}, 2.0)));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// The same for what a synchronised backward does not touch at all.
TEST_P(GradientSyncEffects, AUnitThatForwardTouchedIsReducedThoughNoRankDifferentiatesIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto model = two_layers(mesh);
    const auto x = torch::ones({1, 4});
    const auto traffic = traffic_of(mesh, [&] {
      const auto unused = model->a(x);
      model->b(x).sum().backward();
    });
    EXPECT_EQ(traffic.reduce_scatters, 2);
    EXPECT_FALSE(model->a->parameters()[0].grad().defined());  // no rank used it
    EXPECT_TRUE(model->b->parameters()[0].grad().defined());
    EXPECT_EQ(traffic_of(mesh, [&] { model->b(x).sum().backward(); }).reduce_scatters, 1);
  });
}

TEST_P(GradientSyncEffects, TheDivideFactorReplacesTheNumberOfRanks) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto model = two_layers(mesh);
    get_fsdp_module(*model->a).set_gradient_divide_factor(0.5);
    const auto x = torch::full({1, 4}, 1.0 + static_cast<double>(rank));
    (model->a(x).sum() + model->b(x).sum()).backward();
    double sum = 0;
    for (int64_t r = 0; r < world(); ++r) sum += 1.0 + static_cast<double>(r);
    const auto a = full_gradient(model->a->parameters()[0]);
    const auto b = full_gradient(model->b->parameters()[0]);
    EXPECT_TRUE(torch::allclose(a, torch::full({4, 4}, sum / 0.5)));
    EXPECT_TRUE(torch::allclose(b, torch::full({4, 4}, sum / static_cast<double>(world()))));
    EXPECT_THROW(get_fsdp_module(*model->a).set_gradient_divide_factor(0), c10::ValueError);
  });
}

INSTANTIATE_WORLDS(GradientSyncEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
