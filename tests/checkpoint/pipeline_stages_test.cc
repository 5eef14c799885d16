// Ranks whose models differ, as the stages of a pipeline do.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

struct StageImpl : torch::nn::Module {
  explicit StageImpl(int64_t number)
      : linear(register_module("stage" + std::to_string(number), torch::nn::Linear(2, 2))),
        steps(register_buffer("steps" + std::to_string(number), torch::full({1}, number))) {}
  torch::nn::Linear linear;
  torch::Tensor steps;
};
TORCH_MODULE(Stage);

torch::optim::AdamWOptions options_of(int64_t rank) {
  return torch::optim::AdamWOptions(0.1 * static_cast<double>(rank + 1));
}

TEST(StagesCheckpoint, AreOneCheckpointThatOneRankReads) {
  TemporaryFolder folder;
  run_ranks(3, [&](int64_t rank) {
    torch::manual_seed(rank);
    Stage stage(rank);
    torch::optim::AdamW optimizer(stage->parameters(), options_of(rank));
    stage->linear(torch::ones({1, 2})).sum().backward();
    optimizer.step();
    save({.model = stage, .optimizer = optimizer}, folder / "saved");
    Stage other(rank);
    torch::optim::AdamW other_optimizer(other->parameters(), torch::optim::AdamWOptions(7.0));
    const auto loaded = load({.model = other, .optimizer = other_optimizer}, folder / "saved");
    EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
    EXPECT_TRUE(torch::equal(other->linear->weight, stage->linear->weight));
    EXPECT_EQ(other_optimizer.param_groups()[0].options().get_lr(), options_of(rank).lr());
    EXPECT_EQ(other_optimizer.state().size(), 2u);
  });
  for (int64_t number = 0; number < 3; ++number) {
    Stage stage(number);
    stage->steps.fill_(9);
    const auto loaded = load({.model = stage}, folder / "saved", {.strict = false});
    EXPECT_TRUE(loaded.missing.empty());
    EXPECT_EQ(loaded.unexpected.size(), 6u);  // of the two others
    EXPECT_EQ(stage->steps.item<int64_t>(), number);
  }
  verify_checkpoint(folder / "saved");
}

TEST(StagesCheckpoint, WhatOneRankMissesOrNoRankExpectsIsToldToAll) {
  TemporaryFolder folder;
  run_ranks(3, [&](int64_t rank) {
    Stage stage(rank), fourth(rank == 2 ? 3 : rank);
    save({.model = stage}, folder / "saved");
    const std::string text = message_of([&] { load({.model = fourth}, folder / "saved"); });
    EXPECT_THAT(text, HasSubstr("missing in the file: stage3.weight, stage3.bias, steps3"));
    EXPECT_THAT(text, HasSubstr("in the file only: stage2.bias, stage2.weight, steps2; "));
    const auto loaded = load({.model = fourth}, folder / "saved", {.strict = false});
    EXPECT_EQ(loaded.missing.size(), rank == 2 ? 3u : 0u);
    EXPECT_EQ(loaded.unexpected.size(), 3u);
  });
}

TEST(StagesCheckpoint, OptimizersOfTwoClassesUnderOneNameAreRefused) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    Stage stage(rank);
    torch::optim::AdamW adamw(stage->parameters(), options_of(rank));
    torch::optim::SGD sgd(stage->parameters(), torch::optim::SGDOptions(0.1));
    const State state{.model = stage,
                      .optimizer = rank == 0 ? OptimizerRef(adamw) : OptimizerRef(sgd)};
    EXPECT_THAT(message_of([&] { save(state, folder / "saved"); }),
                HasSubstr("rank 1's optimizer is torch::optim::SGD, and an earlier rank's of the "
                          "same name torch::optim::AdamW"));
  });
}

TEST(StagesCheckpoint, OneNameOfTwoShapesIsRefused) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    const std::map<std::string, at::Tensor> tensors = {{"w", torch::ones({rank + 1})}};
    EXPECT_THAT(message_of([&] { save({.tensors = tensors}, folder / "saved"); }),
                HasSubstr("'w' of 'tensors' has another shape"));
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// Rank r of 4 is in the slice r % 2.
DeviceMesh own_slice() { return init_device_mesh(torch::kCPU, {2, 2}, {"dp", "slices"})["dp"]; }

TEST(StagesCheckpoint, WhatSlicesHaveAlikeIsOneTensor) {
  TemporaryFolder folder;
  const auto whole = torch::arange(5.);
  run_ranks(4, [&](int64_t rank) {
    const auto norm = distribute_tensor(whole, own_slice(), {Shard{0}});
    const std::string own = "own" + std::to_string(rank % 2);
    save({.tensors = {{"norm", norm}, {own, DTensor(norm + rank % 2)}}}, folder / "saved");
    const auto read = torch::zeros({5}), of_slice = torch::zeros({5});
    load({.tensors = {{"norm", read}, {"own1", of_slice}}}, folder / "saved", {.strict = false});
    EXPECT_TRUE(read.equal(whole));
    EXPECT_TRUE(of_slice.equal(whole + 1));
    const auto again = distribute_tensor(torch::zeros({5}), own_slice(), {Shard{0}});
    load({.tensors = {{"norm", again}}}, folder / "saved", {.strict = false});
    EXPECT_TRUE(DTensor(again).full_tensor().equal(whole));
  });
}

TEST(StagesCheckpoint, WhatSlicesHaveOfTheirOwnByOneNameIsRefused) {
  TemporaryFolder folder;
  run_ranks(4, [&](int64_t rank) {
    auto whole = torch::arange(5.);
    if (rank % 2 == 1) whole[4] = 7;  // which rank 3 holds
    const auto expert = distribute_tensor(whole, own_slice(), {Shard{0}});
    EXPECT_THAT(message_of([&] {
                  save({.tensors = {{"expert", expert}}}, folder / "saved");
                }),
                HasSubstr("on rank 3 than on an earlier rank, or is another one with values"));
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(StagesCheckpoint, OneNameOnMeshesOfDifferentRanksIsRefused) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    const auto own = init_device_mesh(torch::kCPU, {2, 1}, {"ranks", "own"})["own"];
    const std::map<std::string, at::Tensor> tensors = {
        {"expert", distribute_tensor(torch::full({2}, rank), own, {Shard{0}})}};
    EXPECT_THAT(
        message_of([&] { save({.tensors = tensors}, folder / "saved"); }),
        HasSubstr("'expert' of 'tensors' has another shape, dtype, mesh or placement on rank "
                  "1 than on an earlier rank, or is another one with values of its own"));
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace fsdp::testing
