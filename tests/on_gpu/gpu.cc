#include "tests/on_gpu/gpu.h"

#include "device_mesh/process_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace fsdp::testing {
namespace {

c10::Stream current_stream() {
  const c10::impl::VirtualGuardImpl guard(tested_device_type());
  return guard.getStream(guard.getDevice());
}

double difference(const at::Tensor& value, const at::Tensor& expected) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value.sizes() != expected.sizes()) return kInfinity;
  if (value.numel() == 0) return 0;
  const auto wanted = expected.to(at::kDouble);
  const auto most = (value.to(at::kDouble) - wanted).abs().max().item<double>();
  if (!std::isfinite(most)) return kInfinity;
  const auto scale = wanted.abs().max().item<double>();
  return scale > 0 ? most / scale : most;
}

}  // namespace

c10::DeviceType tested_device_type() {
  const auto* const chosen = std::getenv("FSDP_TEST_DEVICE");
  return chosen != nullptr && std::string_view(chosen) == "cpu" ? c10::kCPU : c10::kCUDA;
}

std::string tested_backend() { return tested_device_type() == c10::kCPU ? "gloo" : "nccl"; }

int cuda_devices() { return static_cast<int>(torch::cuda::device_count()); }

void occupy_current_stream() {
  if (tested_device_type() == c10::kCPU) return;
  const at::NoGradGuard no_grad;
  thread_local const auto factor = torch::full({4096, 4096}, 1e-4, tested_device_type());
  for (int i = 0; i < 20; ++i) factor.mm(factor);
}

bool is_current_stream_busy() { return !current_stream().query(); }

int64_t ranks_of(const std::vector<int64_t>& mesh) { return c10::multiply_integers(mesh); }

FakeWorld::FakeWorld(int64_t ranks) {
  init_process_group({.backend = "fake", .rank = 0, .world_size = ranks});
}
FakeWorld::~FakeWorld() { destroy_process_group(); }

Values run_in_fake_world(const TrainingProgram& program, c10::DeviceType device, int64_t ranks) {
  const FakeWorld world(ranks);
  ProgramRank rank(init_device_mesh(device, {ranks}));
  program(rank);
  return rank.values();
}

double largest_difference(const Values& values, const Values& expected) {
  if (values.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i)
    largest = std::max(largest, difference(values[i], expected[i]));
  return largest;
}

void report_figure(const std::string& name, double value, const std::string& unit) {
  std::printf("FIGURE %s: %.6g %s\n", name.c_str(), value, unit.c_str());
}

}  // namespace fsdp::testing
