// One rank of a small sharded training, for two_hosts.py: says on lines of its own when
// it has met the others, each step, what it failed of, and how long ending took.
//
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=... rank TIMEOUT_IN_SECONDS STEPS
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void train(std::chrono::seconds timeout, int64_t steps) {
  fsdp::init_process_group({.backend = "gloo", .timeout = timeout});
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});
  std::printf("rank %lld met the others\n", static_cast<long long>(mesh.rank()));
  torch::manual_seed(0);
  torch::nn::Linear model(64, 64);
  fsdp::fully_shard(model, mesh);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model->forward(torch::ones({8, 64})).pow(2).mean().backward();
    optimizer.step();
    std::printf("step %lld\n", static_cast<long long>(step));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace

int main(int, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int code = 0;
  const auto begin = Clock::now();
  try {
    train(std::chrono::seconds(std::atoll(argv[1])), std::atoll(argv[2]));
  } catch (const c10::Error& error) {
    std::printf("failed after %.1f s: %s\n", seconds_since(begin), error.what_without_backtrace());
    code = 1;
  }
  const auto end = Clock::now();
  try {
    fsdp::destroy_process_group();
  } catch (const std::exception& error) {
    std::printf("ending failed: %s\n", error.what());
    code = 1;
  }
  std::printf("ended in %.1f s\n", seconds_since(end));
  return code;
}
