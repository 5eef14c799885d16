// Steps of a transformer's blocks in worlds where nothing is sent: the host never waits
// in them, a CUDA graph can hold them, and what they launch does not depend on the number
// of ranks.
#include "dtensor/dtensor.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_gpu/cuda_runtime.h"
#include "tests/on_gpu/gpu.h"
#include "tests/support/default_generator.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

#define SKIP_WITHOUT_CUDA_RUNTIME() \
  SKIP_UNLESS_CUDA_DEVICES(1);      \
  if (!cuda::is_there()) GTEST_SKIP() << "NOT SHOWN ON CUDA: compiled without CUDA's headers"

constexpr int64_t kWidth = 128;

struct GpuBlock : torch::nn::Module {
  GpuBlock() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
};

struct GpuModel : torch::nn::Module {
  GpuModel() {
    for (const auto& name : {"0", "1", "2"})
      blocks.push_back(register_module(name, std::make_shared<GpuBlock>()));
  }
  std::vector<std::shared_ptr<GpuBlock>> blocks;
};

struct GpuStep {
  std::string name;
  std::vector<int64_t> mesh = {2};
  FullyShardOptions options = {};
  bool recomputes = false;
  bool clips = false;
};

void PrintTo(const GpuStep& step, std::ostream* out) { *out << step.name; }

class ShardedBlocks {
 public:
  explicit ShardedBlocks(const GpuStep& step)
      : step_(step), mesh_(init_device_mesh(c10::kCUDA, step.mesh)) {
    for (const auto& block : model_->blocks) fully_shard(*block, mesh_, step.options);
    fully_shard(*model_, mesh_, step.options);
    x_ = torch::linspace(-1, 1, 8 * kWidth, c10::kCUDA).view({8, kWidth});
    optimizer_.emplace(model_->parameters(), 0.1);
  }

  void forward_and_backward() {
    auto hidden = x_;
    for (const auto& block : model_->blocks) {
      const auto run = [block](const at::Tensor& in) { return block->forward(in); };
      hidden =
          step_.recomputes ? checkpoint({.preserve_rng_state = false}, run, hidden) : run(hidden);
    }
    loss_ = hidden.to(at::kFloat).pow(2).mean();
    loss_.backward();
    if (step_.clips) clip_grad_norm_(model_->parameters(), 0.1);
  }
  // With gradients that keep their tensors, as a graph needs them.
  void step() {
    optimizer_->zero_grad(/*set_to_none=*/false);
    forward_and_backward();
    optimizer_->step();
  }
  void zero_grad() { optimizer_->zero_grad(/*set_to_none=*/false); }
  void optimize() { optimizer_->step(); }

  Values values() const {
    Values values = {loss_.detach().cpu()};
    for (const auto& parameter : model_->parameters())
      values.push_back(DTensor(parameter).to_local().detach().cpu());
    return values;
  }

 private:
  GpuStep step_;
  DeviceMesh mesh_;
  std::shared_ptr<GpuModel> model_ =
      drawn_from_seed(1, [] { return std::make_shared<GpuModel>(); });
  at::Tensor x_, loss_;
  std::optional<torch::optim::SGD> optimizer_;
};

std::vector<GpuStep> gpu_steps() {
  return {{.name = "TwoRanks"},
          {.name = "EightRanks", .mesh = {8}},
          {.name = "SixtyFourRanks", .mesh = {64}},
          {.name = "Hybrid", .mesh = {2, 4}},
          {.name = "Kept", .mesh = {8}, .options = {.reshard_after_forward = false}},
          {.name = "ToAWorldOfTwo",
           .mesh = {8},
           .options = {.reshard_after_forward = ReshardAfterForward::to_world(2)}},
          {.name = "MixedPrecision",
           .mesh = {8},
           .options = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}},
          {.name = "Recomputed", .mesh = {8}, .recomputes = true},
          {.name = "Clipped", .mesh = {8}, .clips = true}};
}

class GpuSteps : public ::testing::TestWithParam<GpuStep> {};

TEST_P(GpuSteps, DoNotMakeTheHostWait) {
  SKIP_WITHOUT_CUDA_RUNTIME();
  const FakeWorld world(ranks_of(GetParam().mesh));
  ShardedBlocks blocks(GetParam());
  for (int i = 0; i < 2; ++i) blocks.step();
  occupy_current_stream();
  {
    const cuda::HostWaitsThrow waits_throw;
    for (int i = 0; i < 2; ++i) blocks.step();
  }
  EXPECT_TRUE(is_current_stream_busy());
}

// Three steps, the last two of them a graph's.
TEST_P(GpuSteps, CanBeAGraphWithTheSameBits) {
  SKIP_WITHOUT_CUDA_RUNTIME();
  constexpr int kWarmUp = 3, kReplays = 2;
  const FakeWorld world(ranks_of(GetParam().mesh));
  ShardedBlocks plain(GetParam()), captured(GetParam());
  for (int i = 0; i < kWarmUp + kReplays; ++i) plain.step();
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::StreamGuard on_stream(guard.getNewStream(guard.getDevice(), 0));
  for (int i = 0; i < kWarmUp; ++i) captured.step();
  captured.zero_grad();
  cuda::Graph graph([&] { captured.forward_and_backward(); });
  for (int i = 0; i < kReplays; ++i) {
    captured.zero_grad();
    graph.replay();
    captured.optimize();
  }
  EXPECT_EQ(largest_difference(captured.values(), plain.values()), 0);
  const auto nodes = graph.nodes();
  const auto name = "graph of forward and backward, " + GetParam().name + ", ";
  report_figure(name + "kernels", static_cast<double>(nodes.kernels), "");
  report_figure(name + "copies", static_cast<double>(nodes.copies), "");
  report_figure(name + "sets", static_cast<double>(nodes.sets), "");
  report_figure(name + "other nodes", static_cast<double>(nodes.others), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuSteps, ::testing::ValuesIn(gpu_steps()),
                         [](const auto& info) { return info.param.name; });

// Of one step in a world of `ranks`.
int64_t launches_of(int64_t ranks) {
  const GpuStep step{.mesh = {ranks}};
  const FakeWorld world(ranks);
  ShardedBlocks blocks(step);
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::StreamGuard on_stream(guard.getNewStream(guard.getDevice(), 0));
  for (int i = 0; i < 2; ++i) blocks.step();
  blocks.zero_grad();
  return cuda::Graph([&] { blocks.forward_and_backward(); }).nodes().launches();
}

TEST(GpuLaunches, DoNotDependOnTheNumberOfRanks) {
  SKIP_WITHOUT_CUDA_RUNTIME();
  const auto launches = launches_of(2);
  for (const int64_t ranks : {4, 8, 64}) EXPECT_EQ(launches_of(ranks), launches) << ranks;
}

// Bytes of a step beyond what is there before it and the sharded gradients, with `units`
// layers of kWide x kWide.
constexpr int64_t kWide = 2048, kUnitBytes = kWide * (kWide + 1) * 4;
int64_t bytes_of_step(int64_t units) {
  constexpr int64_t kRanks = 8;
  const FakeWorld world(kRanks);
  const auto mesh = init_device_mesh(c10::kCUDA, {kRanks});
  torch::nn::Sequential model;
  for (int64_t i = 0; i < units; ++i) model->push_back(torch::nn::Linear(kWide, kWide));
  for (const auto& layer : model->children()) fully_shard(*layer, mesh);
  fully_shard(*model, mesh);
  const auto x = torch::ones({1, kWide}, c10::kCUDA);
  model->forward(x).sum().backward();
  auto* const allocator = c10::getDeviceAllocator(c10::kCUDA);
  const auto of_all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto device = local_device(mesh).index();
  const auto bytes = [&] { return allocator->getDeviceStats(device).allocated_bytes[of_all]; };
  allocator->resetPeakStats(device);
  const auto before = bytes().current;
  model->forward(x).sum().backward();
  const auto of_new_gradients = units * kUnitBytes / kRanks;
  return bytes().peak - before - of_new_gradients;
}

TEST(GpuMemory, OfAStepDoesNotGrowWithDepth) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  const auto of_six = bytes_of_step(6), of_twelve = bytes_of_step(12);
  const auto in_units = [](int64_t bytes) { return static_cast<double>(bytes) / kUnitBytes; };
  report_figure("memory of a step beyond shards and their gradients, 6 units on 8 ranks",
                in_units(of_six), "units");
  report_figure("the same, 12 units", in_units(of_twelve), "units");
  EXPECT_LE(of_twelve - of_six, kUnitBytes / 10);
}

}  // namespace
}  // namespace fsdp::testing
