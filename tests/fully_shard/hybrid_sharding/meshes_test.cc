// Meshes other than the whole world: slices, subgroups, several beside each other.
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/trio.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/process_ranks.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::nn::Linear;

Tensor batch_of(int64_t rank) { return torch::full({1, 6}, 1.0 + static_cast<double>(rank)); }

// The gradient of each parameter of a plain Trio, averaged over the data of `ranks`.
std::vector<Tensor> mean_gradients_over(const std::vector<int64_t>& ranks) {
  Trio plain(6);
  for (const auto rank : ranks) plain(batch_of(rank)).sum().backward();
  std::vector<Tensor> means;
  for (const auto& parameter : plain->parameters())
    means.push_back(parameter.grad() / static_cast<double>(ranks.size()));
  return means;
}

void expect_mean_over(const Linear& layer, const std::vector<Tensor>& means, size_t first) {
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::allclose(full_gradient(layer->parameters()[i]), means[first + i], 1e-5))
        << "parameter " << first + i;
  }
}

// A model of its own on each row of a 2x2 grid.
void expect_sharded_over(const DeviceMesh& mesh, int64_t rank) {
  Trio model(6);
  for (auto* layer : {&model->a, &model->b, &model->c}) fully_shard(*layer, mesh);
  fully_shard(model, mesh);
  const auto entry = DTensor(model->a->parameters()[0]);
  EXPECT_EQ(entry.device_mesh(), mesh);
  EXPECT_EQ(entry.to_local().sizes(), at::IntArrayRef({3, 6}));
  const auto before = counters(mesh);
  model(batch_of(rank)).sum().backward();
  EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, 3);
  const auto means = mean_gradients_over(mesh.ranks());
  expect_mean_over(model->a, means, 0);
  expect_mean_over(model->b, means, 2);
  expect_mean_over(model->c, means, 4);
}

TEST(Meshes, ASliceShardsAndAveragesOverItsRanksOnly) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    expect_sharded_over(grid["dp"], rank);
    expect_sharded_over(grid["tp"], rank);
  });
}

TEST(Meshes, AGroupOfTheUsersOwnShardsAndAveragesOverItsRanksOnly) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    expect_sharded_over(DeviceMesh::from_group(grid.group(0), torch::kCPU), rank);
  });
}

TEST(Meshes, APairOfTheUsersOwnGroupsReplicatesAndShards) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    const auto mesh = DeviceMesh::from_groups({grid.group(0), grid.group(1)}, torch::kCPU,
                                              {0, 1, 2, 3}, {2, 2}, {"replicate", "shard"});
    Trio model(6);
    for (auto* layer : {&model->a, &model->b, &model->c}) fully_shard(*layer, mesh);
    fully_shard(model, mesh);
    const auto entry = DTensor(model->a->parameters()[0]);
    EXPECT_EQ(entry.placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
    EXPECT_EQ(entry.to_local().sizes(), at::IntArrayRef({3, 6}));
    const auto means = mean_gradients_over({0, 1, 2, 3});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      const auto before = counters(mesh);
      model(batch_of(rank)).sum().backward();
      EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, 3);
      EXPECT_EQ(counters(mesh).all_reduces - before.all_reduces, 3);
      expect_mean_over(model->a, means, 0);
      expect_mean_over(model->b, means, 2);
      expect_mean_over(model->c, means, 4);
    }
  });
}

TEST(Meshes, UnitsOfOneModelMayLieOnDifferentOnes) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "pp"});
    const auto world = grid.flatten({"dp", "pp"}, "world")["world"];
    Trio model(6);
    fully_shard(model->a, grid["dp"]);
    fully_shard(model->b, grid["pp"]);
    fully_shard(model, world);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model(batch_of(rank)).sum().backward();
      expect_mean_over(model->a, mean_gradients_over(grid["dp"].ranks()), 0);
      expect_mean_over(model->b, mean_gradients_over(grid["pp"].ranks()), 2);
      expect_mean_over(model->c, mean_gradients_over({0, 1, 2, 3}), 4);
    }
  });
}

TEST(Meshes, ClippingCountsEveryUnitOnceWhateverItsMesh) {
  run_ranks(4, [](int64_t) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "pp"});
    const auto world = grid.flatten({"dp", "pp"}, "world")["world"];
    Trio plain(6), model(6);
    fully_shard(model->a, grid["dp"]);
    fully_shard(model->b, grid["pp"]);
    fully_shard(model, world);
    plain(batch_of(0)).sum().backward();
    model(batch_of(0)).sum().backward();
    const auto expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
    EXPECT_NEAR(clip_grad_norm_(model->parameters(), 0.1).item<double>(), expected, 1e-5);
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(torch::allclose(full_gradient(model->parameters()[i]),
                                  plain->parameters()[i].grad(), 1e-4, 1e-7));
    }
  });
}

TEST(Meshes, TwoOverTheSameRanksServeOneModel) {
  run_ranks(2, [](int64_t rank) {
    const auto one = init_device_mesh(torch::kCPU, {2});
    const auto grid = init_device_mesh(torch::kCPU, {1, 2}, {"none", "all"});
    const auto other = grid["all"];
    Trio model(6);
    fully_shard(model->a, one);
    fully_shard(model->b, other);
    fully_shard(model, one);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model(batch_of(rank)).sum().backward();
      const auto means = mean_gradients_over({0, 1});
      expect_mean_over(model->a, means, 0);
      expect_mean_over(model->b, means, 2);
      expect_mean_over(model->c, means, 4);
    }
    EXPECT_EQ(resident_bytes(counters(one)), 0);
    EXPECT_EQ(resident_bytes(counters(other)), 0);
  });
}

double trained_sum() {
  Trio model(6);
  const auto mesh = init_device_mesh(torch::kCPU, {2});
  fully_shard(model, mesh);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  model(batch_of(mesh.rank())).sum().backward();
  optimizer.step();
  double sum = 0;
  for (const auto& parameter : model->parameters())
    sum += full_value(parameter).sum().item<double>();
  return sum;
}

const ChildCase kStartsAgain("starts_again", [] {
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
  Trio old(6);
  fully_shard(old, init_device_mesh(torch::kCPU, {2}));
  const auto first = trained_sum();
  destroy_process_group();
  const auto refusal = message_of([&] { old(batch_of(0)); });
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
  const auto second = trained_sum();
  destroy_process_group();
  std::printf("refusal: %s\n", refusal.c_str());
  return first == second ? 0 : 1;
});

TEST(Meshes, AfterADestroyedGroupAnotherIsMadeAtTheSamePort) {
  for (const auto& end : run_processes("starts_again", 2, std::chrono::seconds(60))) {
    EXPECT_EQ(end.exit_code, 0) << end.output;
    EXPECT_THAT(end.output, AllOf(HasSubstr("refusal:"), HasSubstr("destroy_process_group")))
        << "the old model can not go on";
  }
}

}  // namespace
}  // namespace fsdp::testing
