// Loss scaling: what becomes of gradients, steps and the scale, on all ranks alike.
#include "fully_shard/grad_scaler.h"

#include "tests/fully_shard/support/mixed_precision.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor loss_of(Pair& model, int64_t rank) { return model(input_of(rank)).pow(2).sum(); }

std::vector<Tensor> values_of(const Pair& model) {
  std::vector<Tensor> values;
  for (const auto& parameter : model->parameters()) values.push_back(full_value(parameter).clone());
  return values;
}

void expect_equal(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << i;
}

// In what this rank holds of the first layer's weight.
void spoil_gradient(const Pair& model) {
  auto part = DTensor(model->named_parameters()["first.weight"].grad()).to_local();
  if (part.numel() > 0) part.view({-1})[0] = kInfinity;
}

class GradScaling : public Worlds {};

TEST_P(GradScaling, AStepIsThatOfTheLossItself) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto scaled = sharded(Pair(4, 6, 3), mesh), plain = sharded(Pair(4, 6, 3), mesh);
    torch::optim::AdamW optimizer(scaled->parameters()), reference(plain->parameters());
    GradScaler scaler(mesh);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      reference.zero_grad();
      scaler.scale(loss_of(scaled, rank)).backward();
      loss_of(plain, rank).backward();
      for (size_t i = 0; i < plain->parameters().size(); ++i)
        EXPECT_TRUE(full_gradient(scaled->parameters()[i])
                        .equal(full_gradient(plain->parameters()[i]) * 65536));
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      reference.step();
    }
    expect_equal(values_of(scaled), values_of(plain));
    EXPECT_EQ(scaler.get_scale(), 65536);
  });
}

TEST_P(GradScaling, UnscaledGradientsCanBeClippedBeforeTheStep) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh);
    loss_of(model, rank).backward();
    std::vector<Tensor> expected;
    for (const auto& parameter : model->parameters()) expected.push_back(full_gradient(parameter));
    optimizer.zero_grad();
    scaler.scale(loss_of(model, rank)).backward();
    scaler.unscale_(optimizer);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(full_gradient(model->parameters()[i]).equal(expected[i]));
    EXPECT_TRUE(scaler.step(optimizer)) << "divides nothing a second time";
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(full_gradient(model->parameters()[i]).equal(expected[i]));
  });
}

TEST_P(GradScaling, AGradientThatIsNotFiniteOnOneRankStopsTheStepOfAll) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh);
    for (int64_t spoiler = 0; spoiler < world(); ++spoiler) {
      const auto before = values_of(model);
      const auto scale = scaler.get_scale();
      optimizer.zero_grad();
      scaler.scale(loss_of(model, rank)).backward();
      if (rank == spoiler) spoil_gradient(model);
      EXPECT_FALSE(scaler.step(optimizer));
      scaler.update();
      expect_equal(values_of(model), before);
      EXPECT_EQ(scaler.get_scale(), scale / 2);
    }
    optimizer.zero_grad();
    scaler.scale(loss_of(model, rank)).backward();
    EXPECT_TRUE(scaler.step(optimizer));
  });
}

TEST_P(GradScaling, OneOptimizerStepsThoughAnothersGradientsAreNotFinite) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto good = sharded(Pair(4, 6, 3), mesh), bad = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD steps(good->parameters(), 0.1), stays(bad->parameters(), 0.1);
    GradScaler scaler(mesh);
    scaler.scale(loss_of(good, rank) + loss_of(bad, rank)).backward();
    if (rank == 0) spoil_gradient(bad);
    EXPECT_TRUE(scaler.step(steps));
    EXPECT_FALSE(scaler.step(stays));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768);
  });
}

INSTANTIATE_WORLDS(GradScaling, 1, 2, 3);

TEST(GradScalingOverReplicas, IsAgreedOverBothDimensions) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh);
    scaler.scale(loss_of(model, rank)).backward();
    if (rank == 3) spoil_gradient(model);
    EXPECT_FALSE(scaler.step(optimizer));
  });
}

TEST(GradScalerAlone, GrowsAfterItsInterval) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.0);
    GradScaler scaler(mesh, {.init_scale = 4, .growth_factor = 8, .growth_interval = 2});
    std::vector<double> scales;
    for (int step = 0; step < 4; ++step) {
      scaler.scale(loss_of(model, 0)).backward();
      scaler.step(optimizer);
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, (std::vector<double>{4, 32, 32, 256}));
  });
}

TEST(GradScalerAlone, ThatIsNotEnabledChangesNothing) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh, {.enabled = false});
    const auto loss = loss_of(model, 0);
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    spoil_gradient(model);
    scaler.unscale_(optimizer);
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 1);
  });
}

TEST(GradScalerAlone, GoesOnFromACheckpoint) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.0);
    GradScaler first(mesh, {.growth_interval = 2}), second(mesh, {.growth_interval = 2});
    const auto train = [&](GradScaler& scaler) {
      scaler.scale(loss_of(model, 0)).backward();
      scaler.step(optimizer);
      scaler.update();
    };
    train(first);
    second.load_state(first.state());
    train(second);
    EXPECT_EQ(second.get_scale(), 131072);
    expect_error<c10::ValueError>([&] { second.load_state({.scale = 0}); },
                                  HasSubstr("the scale is 0"));
    EXPECT_EQ(second.get_scale(), 131072);
  });
}

TEST(GradScalerAlone, RefusesWhatWouldDivideTwiceOrNotAtAll) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 6, 3), mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(mesh);
    expect_error<c10::ValueError>([&] { scaler.update(); }, HasSubstr("update() without"));
    scaler.scale(loss_of(model, 0)).backward();
    scaler.unscale_(optimizer);
    const auto gradient = full_gradient(model->parameters()[0]).clone();
    expect_error<c10::ValueError>([&] { scaler.unscale_(optimizer); }, HasSubstr("unscale_()"));
    EXPECT_TRUE(full_gradient(model->parameters()[0]).equal(gradient));
    EXPECT_TRUE(scaler.step(optimizer));
    expect_error<c10::ValueError>([&] { scaler.step(optimizer); }, HasSubstr("step()"));
    expect_error<c10::ValueError>([&] { GradScaler(mesh, {.backoff_factor = 2}); },
                                  HasSubstr("backoff_factor is 2"));
  });
}

TEST(GradScalerAlone, RefusesGradientsInHalf) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto parameter = torch::ones({2, 3}, torch::kHalf).requires_grad_();
    parameter.mutable_grad() = torch::ones({2, 3}, torch::kHalf);
    torch::optim::SGD optimizer(std::vector<Tensor>{parameter}, 0.1);
    GradScaler scaler(mesh);
    expect_error<c10::ValueError>([&] { scaler.unscale_(optimizer); }, HasSubstr("in fp16"));
  });
}

}  // namespace
}  // namespace fsdp::testing
