// A model ten times larger than the memory that is left, built and sharded.
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/instrumented.h"
#include "tests/support/process_ranks.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <new>
#include <string>

namespace fsdp::testing {
namespace {

constexpr int64_t kAllowed = int64_t{48} << 20;  // bytes
constexpr int64_t kWidth = 1024, kLayers = 120;  // 4 MiB a layer, 480 MiB
static_assert(kLayers * kWidth * kWidth * 4 >= 10 * kAllowed);

int64_t private_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == "VmData:" && status >> kibibytes) return kibibytes << 10;
  }
  return std::numeric_limits<int64_t>::max();
}

void allow_more(int64_t bytes) {
  const auto limit = static_cast<rlim_t>(private_bytes() + bytes);
  const rlimit limits = {limit, limit};
  TORCH_CHECK(setrlimit(RLIMIT_DATA, &limits) == 0, "setrlimit failed");
}

torch::nn::Sequential build() {
  torch::nn::Sequential layers;
  for (int64_t i = 0; i < kLayers; ++i)
    layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  return layers;
}

// In a fake world of 64.
DeviceMesh start() {
  torch::set_num_threads(1);  // each would have a stack
  init_process_group({.backend = "fake", .rank = 3, .world_size = 64});
  const auto mesh = init_device_mesh(torch::kCPU, {64});
  torch::manual_seed(1);
  torch::nn::Linear warm(2, 2);  // what LibTorch allocates once
  return mesh;
}

const ChildCase kDeferred("deferred_model_beyond_memory", [] {
  const auto mesh = start();
  allow_more(kAllowed);
  auto layers = deferred_init(build);
  for (const auto& layer : *layers) fully_shard(layer.ptr(), mesh);
  fully_shard(layers, mesh);
  materialize(*layers);
  const auto weight = DTensor(layers->parameters().back()).to_local();
  return weight.size(0) == kWidth / 64 && weight.abs().sum().item<float>() > 0 ? 0 : 3;
});

const ChildCase kAtOnce("model_beyond_memory", [] {
  start();
  allow_more(kAllowed);
  try {
    build();
  } catch (const std::exception&) {
    return 7;
  }
  return 0;
});

class DeferredMemory : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef FSDP_INSTRUMENTED
    GTEST_SKIP() << "a sanitizer's own memory counts";
#endif
  }
};

TEST_F(DeferredMemory, OfAModelTenTimesTheMemoryIsEnough) {
  const auto end =
      run_processes("deferred_model_beyond_memory", 1, std::chrono::seconds(100)).front();
  EXPECT_EQ(end.exit_code, 0) << end.output;
}

TEST_F(DeferredMemory, TheLimitHolds) {
  const auto end = run_processes("model_beyond_memory", 1, std::chrono::seconds(60)).front();
  EXPECT_EQ(end.exit_code, 7) << end.output;
}

}  // namespace
}  // namespace fsdp::testing
