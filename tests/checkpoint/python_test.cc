// Python reads what is saved. CHECKPOINT_PYTHON names an interpreter with torch and
// safetensors; without them the test is skipped.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace fsdp::testing {
namespace {

std::string interpreter() {
  const char* named = std::getenv("CHECKPOINT_PYTHON");
  return named == nullptr ? "python3" : named;
}

TEST(PythonReaders, ReadModelsAndOptimizersOfBothLayouts) {
  if (std::system((interpreter() + " -c 'import torch, safetensors' 2> /dev/null").c_str()) != 0) {
    GTEST_SKIP() << interpreter() << " has no torch and safetensors";
  }
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    SmallModel model;
    shard_small_model(model, init_device_mesh(torch::kCPU, {2}));
    fill(*model, 2);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.25));
    model->forward(torch::rand({4, 5})).pow(2).sum().backward();
    optimizer.step();
    fill(*model, 1);
    save({.model = model, .optimizer = optimizer}, folder / "sharded");
    save({.model = model}, folder / "full", {.layout = Layout::kFull, .max_file_bytes = 100});
    save({.model = model, .optimizer = optimizer}, folder / "whole", {.layout = Layout::kFull});
  });
  std::filesystem::copy(folder / "whole/optimizer", folder / "full/optimizer");
  const std::string sharded = folder / "sharded", full = folder / "full";
  const std::string command =
      interpreter() + " tests/checkpoint/fixtures/read_checkpoint.py " + sharded + " " + full;
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace fsdp::testing
