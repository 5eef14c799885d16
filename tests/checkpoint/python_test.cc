// Python reads what is saved: the interpreter of the environment that LibTorch lies in,
// or the one that CHECKPOINT_PYTHON names.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/thread_ranks.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace fsdp::testing {
namespace {

// .../bin/python3 for a LibTorch in .../lib/python3.*/site-packages/torch/lib.
std::string interpreter() {
  if (const char* named = std::getenv("CHECKPOINT_PYTHON")) return named;
  Dl_info library;
  const auto* some_function = reinterpret_cast<const void*>(&at::get_num_threads);
  if (dladdr(some_function, &library) == 0) return "python3";
  const auto path = std::filesystem::canonical(library.dli_fname);
  auto environment = path;
  for (int i = 0; i < 6; ++i) environment = environment.parent_path();
  const auto python = environment / "bin/python3";
  return std::filesystem::exists(python) ? python.string() : "python3";
}

TEST(PythonReaders, ReadModelsOptimizersAndBoxesOfBothLayouts) {
  const std::string python = interpreter();
  if (std::system((python + " -c 'import torch, safetensors, numpy' 2> /dev/null").c_str()) != 0) {
    GTEST_SKIP() << "NOTHING WAS CHECKED: " << python << " has no torch, safetensors and numpy. "
                 << "tools/setup installs them, unless TORCH_DIR is given; then install them there "
                 << "or name another interpreter by CHECKPOINT_PYTHON";
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
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    const auto cut = [&](const torch::Tensor& whole, int64_t dim) {
      return distribute_tensor(whole, mesh, {Shard{.dim = dim, .outer = 3, .unit = 2}, Shard{0}});
    };
    const std::map<std::string, at::Tensor> tensors = {
        {"rows", cut(torch::arange(90).view({30, 3}), 0)},
        {"columns", cut(torch::arange(60).view({5, 12}), 1)}};
    save({.tensors = tensors}, folder / "boxes");
    save({.tensors = tensors}, folder / "boxes_whole", {.layout = Layout::kFull});
  });
  std::filesystem::copy(folder / "whole/optimizer", folder / "full/optimizer");
  const std::string sharded = folder / "sharded", full = folder / "full";
  const std::string command = python + " tests/checkpoint/fixtures/read_checkpoint.py " + sharded +
                              " " + full + " " + (folder / "boxes") + " " +
                              (folder / "boxes_whole");
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace fsdp::testing
