// Times training steps (forward, backward, AdamW) of the example's transformer, plain or
// sharded, and prints one line of JSON on rank 0. One process is one rank, as RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; `run` and `host_cost` start them.
//
//   step_time --implementation=sharded --width=64 --blocks=4 --tokens=32
//
// "plain" ranks do not communicate: they keep each other's cores busy as the sharded ones
// do. "beside_plain" is "sharded" with a plain step before each, and tells what the
// sharded step takes beyond it: whatever else the machine does meets both.
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

ABSL_FLAG(std::string, implementation, "sharded", "plain, sharded or beside_plain");
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

double timed_step(Training& training) {
  const auto begin = std::chrono::steady_clock::now();
  training.step();
  return seconds_since(begin);
}

// In seconds, one per timed step.
struct Times {
  std::vector<double> steps;
  std::vector<double> beyond_plain;  // empty without a plain model
};

Times timed_steps(Training& training, Training* plain) {
  Times times;
  for (int64_t i = -absl::GetFlag(FLAGS_warmup); i < absl::GetFlag(FLAGS_steps); ++i) {
    const auto of_plain = plain != nullptr ? timed_step(*plain) : 0.0;
    const auto of_step = timed_step(training);
    if (i < 0) continue;
    times.steps.push_back(of_step);
    if (plain != nullptr) times.beyond_plain.push_back(of_step - of_plain);
  }
  return times;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print_json(const Times& times, double waiting) {
  std::printf("{\"implementation\": \"%s\", \"median_seconds\": %.9f, ",
              absl::GetFlag(FLAGS_implementation).c_str(), median(times.steps));
  if (!times.beyond_plain.empty())
    std::printf("\"median_seconds_beyond_plain\": %.9f, ", median(times.beyond_plain));
  std::printf("\"waiting_seconds\": %.6f}\n", waiting);
}

void run() {
  const auto implementation = absl::GetFlag(FLAGS_implementation);
  TORCH_CHECK_VALUE(
      implementation == "plain" || implementation == "sharded" || implementation == "beside_plain",
      "--implementation: ", implementation, ", allowed are plain, sharded and beside_plain");
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_steps) > 0, "--steps must be positive");
  at::set_num_threads(1);
  const auto place = fsdp::launch_environment();
  std::optional<fsdp::DeviceMesh> mesh;
  if (implementation != "plain") {
    fsdp::ProcessGroupOptions options;
    options.backend = absl::GetFlag(FLAGS_backend);
    fsdp::init_process_group(options);
    mesh = fsdp::init_device_mesh(torch::kCPU, {place.world_size});
  }
  {
    std::optional<Training> plain;
    if (implementation == "beside_plain") plain.emplace(std::nullopt);
    Training training(mesh);
    const auto times = timed_steps(training, plain ? &*plain : nullptr);
    if (place.rank == 0) print_json(times, mesh ? fsdp::counters(*mesh).wait_seconds : 0.0);
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
