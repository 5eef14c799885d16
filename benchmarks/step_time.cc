// Times training steps (forward, backward, AdamW) of the example's transformer, plain or
// sharded, and prints one line of JSON on rank 0. One process is one rank, as RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; `run` and `host_cost` start them.
//
//   step_time --implementation=sharded --width=64 --blocks=4 --tokens=32
//
// "plain" ranks do not communicate: they keep each other's cores busy as the sharded ones
// do.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "examples/transformer.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

ABSL_FLAG(std::string, implementation, "sharded", "plain or sharded");
ABSL_FLAG(std::string, backend, "gloo",
          "of the process group; fake: nothing is sent, and this process is the only one");
ABSL_FLAG(int64_t, width, 64, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks");
ABSL_FLAG(int64_t, tokens, 32, "tokens per sequence");
ABSL_FLAG(int64_t, batch, 2, "sequences per rank");
ABSL_FLAG(int64_t, warmup, 10, "steps before the clock starts");
ABSL_FLAG(int64_t, steps, 50, "steps timed");

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One rank's model with what a step needs.
class Training {
 public:
  // No mesh: the plain module.
  explicit Training(const std::optional<fsdp::DeviceMesh>& mesh) : model_(make_model()) {
    if (mesh) shard(*mesh);
    optimizer_.emplace(model_->parameters(), torch::optim::AdamWOptions(3e-4));
    auto text = torch::randint(256, {absl::GetFlag(FLAGS_batch), absl::GetFlag(FLAGS_tokens) + 1},
                               torch::kLong);
    inputs_ = text.narrow(1, 0, absl::GetFlag(FLAGS_tokens)).contiguous();
    targets_ = text.narrow(1, 1, absl::GetFlag(FLAGS_tokens)).contiguous();
  }

  void step() {
    optimizer_->zero_grad();
    examples::next_token_loss(model_->forward(inputs_), targets_).backward();
    optimizer_->step();
  }

 private:
  static examples::Transformer make_model() {
    torch::manual_seed(1);
    return examples::Transformer(
        examples::TransformerConfig{.width = absl::GetFlag(FLAGS_width),
                                    .blocks = absl::GetFlag(FLAGS_blocks),
                                    .max_tokens = absl::GetFlag(FLAGS_tokens)});
  }

  void shard(const fsdp::DeviceMesh& mesh) {
    fsdp::fully_shard(model_->embedding, mesh);
    for (auto& block : model_->blocks) fsdp::fully_shard(block, mesh);
    fsdp::fully_shard(model_->head, mesh);
    fsdp::fully_shard(model_, mesh);
  }

  examples::Transformer model_;
  std::optional<torch::optim::AdamW> optimizer_;
  torch::Tensor inputs_, targets_;
};

std::vector<double> timed_steps(Training& training) {
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_warmup); ++i) training.step();
  std::vector<double> seconds;
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_steps); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    training.step();
    seconds.push_back(seconds_since(begin));
  }
  return seconds;
}

void print_json(std::vector<double> seconds, double waiting) {
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"implementation\": \"%s\", \"median_seconds\": %.9f, \"min_seconds\": %.9f, "
      "\"max_seconds\": %.9f, "
      "\"waiting_seconds\": %.6f}\n",
      absl::GetFlag(FLAGS_implementation).c_str(), seconds[seconds.size() / 2], seconds.front(),
      seconds.back(), waiting);
}

void run() {
  const auto implementation = absl::GetFlag(FLAGS_implementation);
  TORCH_CHECK_VALUE(implementation == "plain" || implementation == "sharded",
                    "--implementation: ", implementation, ", allowed are plain and sharded");
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_steps) > 0, "--steps must be positive");
  at::set_num_threads(1);
  const auto place = fsdp::launch_environment();
  std::optional<fsdp::DeviceMesh> mesh;
  if (implementation == "sharded") {
    fsdp::ProcessGroupOptions options;
    options.backend = absl::GetFlag(FLAGS_backend);
    fsdp::init_process_group(options);
    mesh = fsdp::init_device_mesh(torch::kCPU, {place.world_size});
  }
  {
    Training training(mesh);
    auto seconds = timed_steps(training);
    if (place.rank == 0)
      print_json(std::move(seconds), mesh ? fsdp::counters(*mesh).wait_seconds : 0.0);
  }
  mesh.reset();
  if (fsdp::is_process_group_initialized()) fsdp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  try {
    run();
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}
