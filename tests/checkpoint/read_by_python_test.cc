// Python reads what is saved.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/python.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

TEST(PythonReaders, ReadModelsOptimizersAndBoxesOfBothLayouts) {
  if (!python_has_torch()) GTEST_SKIP() << kNoPython;
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
  const std::string folders = (folder / "sharded") + " " + (folder / "full") + " " +
                              (folder / "boxes") + " " + (folder / "boxes_whole");
  EXPECT_EQ(run_python("read_checkpoint.py", folders), 0);
}

}  // namespace
}  // namespace fsdp::testing
