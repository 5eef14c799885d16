// A save by ranks that did not all write their shards would mix two models: an error on
// all of them, and nothing that is legal is taken for it.
#include "checkpoint/checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

torch::nn::Linear saved_layer(const DeviceMesh& mesh, int64_t rows = 6) {
  auto layer = make_linear(4, rows);
  fully_shard(layer, mesh);
  return layer;
}

void train_layer(torch::nn::Linear& layer, torch::optim::Optimizer& optimizer, bool skips) {
  optimizer.zero_grad();
  layer(torch::ones({2, 4})).sum().backward();
  if (!skips) optimizer.step();
}

void write_ones(torch::nn::Linear& layer) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : layer->parameters()) parameter.copy_(torch::ones(parameter.sizes()));
}

class SavesAfterSkippedWrites : public Worlds {};

class SavesAfterWritesThatDiffer : public ::testing::TestWithParam<std::string> {};

TEST_P(SavesAfterWritesThatDiffer, AreErrorsOnEveryRankAndLeaveNothing) {
  const WithEnvironment memory("FSDP_PEER_MEMORY", GetParam());
  const bool is_shared = GetParam() == "on";
  TemporaryFolder folder;
  on_ranks_of(3, [&](int64_t, const DeviceMesh& mesh) {
    for (const auto layout : {Layout::kSharded, Layout::kFull}) {
      const auto path = folder / std::to_string(static_cast<int>(layout));
      auto layer = saved_layer(mesh);
      torch::optim::SGD optimizer(layer->parameters(), 0.1);
      train_layer(layer, optimizer, false);
      train_layer(layer, optimizer, /*skips=*/mesh.rank() == 1);
      EXPECT_THAT(message_of<c10::ValueError>([&] {
                    save({.model = layer, .optimizer = optimizer}, path, {.layout = layout});
                  }),
                  AllOf(HasSubstr("save "), HasSubstr("not all ranks wrote the shards of unit"),
                        HasSubstr("not rank 1"), HasSubstr("optimizer.step()")));
      EXPECT_FALSE(std::filesystem::exists(path));
      if (is_shared) continue;  // such ranks have not written alike for good
      write_ones(layer);
      save({.model = layer, .optimizer = optimizer}, path, {.layout = layout});
      EXPECT_TRUE(full_value(layer->parameters()[0]).equal(torch::ones({6, 4})));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(PeerMemory, SavesAfterWritesThatDiffer, ::testing::Values("on", "off"),
                         [](const auto& info) { return info.param; });

TEST_P(SavesAfterSkippedWrites, AreNoErrorsWhereAllRanksSkipOrAllStep) {
  TemporaryFolder folder;
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto layer = saved_layer(mesh);
    torch::optim::AdamW optimizer(layer->parameters());
    for (int step = 0; step < 4; ++step) {
      train_layer(layer, optimizer, /*skips=*/step % 2 == 1);
      save({.model = layer, .optimizer = optimizer}, folder / std::to_string(step));
    }
  });
}

INSTANTIATE_WORLDS(SavesAfterSkippedWrites, 2, 3);

// Two rows over three ranks: the last has nothing to write, where a touch is collective.
TEST(SavesOfEmptyShards, MayFollowWritesThatTheRankWithoutRowsLeftOutOverGloo) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  TemporaryFolder folder;
  on_ranks_of(3, [&](int64_t, const DeviceMesh& mesh) {
    auto layer = saved_layer(mesh, 2), other = saved_layer(mesh, 2);
    layer(torch::ones({2, 4}));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) {
        if (DTensor(parameter.detach()).to_local().numel() > 0) parameter.mul_(3);
      }
    }
    save({.model = layer}, folder / "saved");
    load({.model = other}, folder / "saved");
    EXPECT_TRUE(full_value(layer->parameters()[0]).equal(full_value(other->parameters()[0])));
  });
}

TEST(SavesOfEmptyShards, AreErrorsWhereARankWithRowsLeftThemOut) {
  TemporaryFolder folder;
  on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = saved_layer(mesh, 2);
    layer(torch::ones({2, 4}));
    {
      const torch::NoGradGuard no_grad;
      if (rank == 0) layer->parameters()[0].mul_(3);
    }
    EXPECT_THAT(message_of<c10::ValueError>([&] { save({.model = layer}, folder / "saved"); }),
                AllOf(HasSubstr("rank 0 did"), HasSubstr("not ranks 1, 2")));
  });
}

class SavesOfReplicas : public ::testing::Test {
 protected:
  static void on_four(const std::function<void(int64_t replica, const DeviceMesh&)>& body) {
    run_ranks(4, [&](int64_t rank) {
      body(rank / 2, init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"}));
    });
  }
};

TEST_F(SavesOfReplicas, OfWhichOneSkippedAStepAreErrorsOnEveryRank) {
  TemporaryFolder folder;
  on_four([&](int64_t replica, const DeviceMesh& mesh) {
    auto layer = saved_layer(mesh);
    torch::optim::SGD optimizer(layer->parameters(), 0.1);
    train_layer(layer, optimizer, false);
    train_layer(layer, optimizer, /*skips=*/replica == 1);
    EXPECT_THAT(message_of<c10::ValueError>([&] { save({.model = layer}, folder / "saved"); }),
                AllOf(HasSubstr("ranks 0, 1 did"), HasSubstr("not ranks 2, 3")));
  });
}

TEST_F(SavesOfReplicas, OfWhichOneEvaluatedAfterTheStepAreNoErrors) {
  TemporaryFolder folder;
  on_four([&](int64_t replica, const DeviceMesh& mesh) {
    auto layer = saved_layer(mesh);
    torch::optim::SGD optimizer(layer->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      train_layer(layer, optimizer, false);
      const torch::NoGradGuard no_grad;
      if (replica == 1) layer(torch::ones({2, 4}));
      save({.model = layer, .optimizer = optimizer}, folder / std::to_string(step));
    }
  });
}

// Models of stages have units of their own numbers and shapes, and write when they like.
TEST(SavesOfStages, AreNotComparedWithEachOther) {
  TemporaryFolder folder;
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"stage", "shard"});
    const auto stage = mesh.local_rank(0);
    auto layer = saved_layer(mesh["shard"]);
    torch::nn::Module model;
    model.register_module("of_" + std::to_string(stage), layer);
    layer(torch::ones({2, 4}));
    if (stage == 1) write_ones(layer);
    save({.model = model}, folder / "saved");
  });
}

}  // namespace
}  // namespace fsdp::testing
