// Times training steps (forward, backward, AdamW or Muon with it) of the example's
// transformer, plain or sharded, and prints one line of JSON on rank 0. One process is
// one rank, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; `run` and `host_cost`
// start them.
//
//   step_time --implementation=sharded --width=64 --blocks=4 --tokens=32
//
// With --tp or --cp the sharded ranks are a mesh of dp x cp x tp. Weights and texts are
// functions of names and places, the same in fsdp2_step_time.py, so that losses can be
// compared.
//
// "plain" ranks do not communicate: they keep each other's cores busy as the sharded ones
// do. "beside_plain" is "sharded" with a plain step before each, and tells what the
// sharded step takes beyond it: whatever else the machine does meets both.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "optim/muon_with_adamw.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/parallelize_module.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

ABSL_FLAG(std::string, implementation, "sharded", "plain, sharded or beside_plain");
ABSL_FLAG(std::string, device, "cpu", "cpu or cuda");
ABSL_FLAG(std::string, backend, "gloo",
          "of the process group; fake: nothing is sent, and this process is the only one");
ABSL_FLAG(std::string, param_dtype, "f32", "f32, or bf16 with sums of gradients in f32");
ABSL_FLAG(bool, codes, false, "gathers of matrices in MXFP8, and reductions in MXINT8");
ABSL_FLAG(bool, optimizer, true, "false: steps are forward and backward alone");
ABSL_FLAG(std::string, muon, "none",
          "none: AdamW alone; rows: Muon of the blocks' matrices as they lie; owners: of matrices "
          "that shard_placement_fn puts on owners");
ABSL_FLAG(int64_t, width, 64, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks");
ABSL_FLAG(int64_t, tokens, 32, "tokens per sequence");
ABSL_FLAG(int64_t, batch, 2, "sequences per rank, or per group of --tp and --cp ranks");
ABSL_FLAG(int64_t, cp, 1, "context parallelism: ranks that share sequences");
ABSL_FLAG(int64_t, tp, 1, "tensor parallelism: ranks that compute one model together");
ABSL_FLAG(bool, sequence_parallel, false, "with --tp: cut activations along the tokens");
ABSL_FLAG(int64_t, warmup, 10, "steps before the clock starts");
ABSL_FLAG(int64_t, steps, 50, "steps timed");

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Bytes that this machine has sent so far, over all interfaces.
int64_t bytes_sent() {
  std::ifstream file("/proc/net/dev");
  int64_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream numbers(line.substr(colon + 1));
    int64_t number = 0;
    for (int i = 0; i < 9; ++i) numbers >> number;  // the ninth: bytes transmitted
    sum += number;
  }
  return sum;
}

void set_start_weights(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    if (item.value().dim() < 2) continue;
    const auto& name = item.key();
    const auto phase = std::accumulate(name.begin(), name.end(), 0.0);
    const auto place = torch::arange(item.value().numel(), torch::kDouble);
    item.value().copy_((place * 0.7 + phase).sin().mul(0.03).view(item.value().sizes()));
  }
}

c10::DeviceType device_type() {
  return absl::GetFlag(FLAGS_device) == "cuda" ? torch::kCUDA : torch::kCPU;
}

// The host waits for what the device was given, so that clocks read what it took.
void wait_for_device() {
  if (device_type() != torch::kCPU) torch::cuda::synchronize();
}

// int64 [batch, tokens + 1]
torch::Tensor text_of(int64_t data_rank) {
  const auto rows = torch::arange(absl::GetFlag(FLAGS_batch)).unsqueeze(1);
  const auto places = torch::arange(absl::GetFlag(FLAGS_tokens) + 1);
  return (rows * 131 + places * places * 7 + data_rank * 29) % 251;
}

// One rank's model with what a step needs.
class Training {
 public:
  // No mesh: the plain module.
  explicit Training(const std::optional<fsdp::DeviceMesh>& mesh) : model_(make_model()) {
    set_start_weights(*model_);
    if (mesh)
      shard(*mesh);
    else
      to_device_plainly();
    optimizer_ = make_optimizer();
    const auto text = text_of(mesh ? (*mesh)["dp"].local_rank() : 0);
    inputs_ = text.narrow(1, 0, absl::GetFlag(FLAGS_tokens)).contiguous().to(device_type());
    targets_ = text.narrow(1, 1, absl::GetFlag(FLAGS_tokens)).contiguous().to(device_type());
    if (!mesh || absl::GetFlag(FLAGS_cp) == 1) return;
    for (torch::Tensor* const tokens : {&inputs_, &targets_})
      *tokens =
          fsdp::distribute_tensor(*tokens, (*mesh)["cp"], {fsdp::Shard{.dim = 1, .outer = 8}});
  }

  void step() {
    optimizer_->zero_grad();
    loss_ = programs::next_token_loss(model_->forward(inputs_), targets_);
    loss_.backward();
    if (absl::GetFlag(FLAGS_optimizer)) optimizer_->step();
  }
  // Of the last step. Collective.
  double loss() const { return loss_.item<double>(); }

 private:
  static programs::Transformer make_model() {
    return programs::Transformer(
        programs::TransformerConfig{.width = absl::GetFlag(FLAGS_width),
                                    .blocks = absl::GetFlag(FLAGS_blocks),
                                    .max_tokens = absl::GetFlag(FLAGS_tokens)});
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() {
    // With a smaller eps AdamW divides rounding by rounding, and no two programs agree.
    const auto adamw = torch::optim::AdamWOptions(3e-4).eps(1e-3);
    if (absl::GetFlag(FLAGS_muon) == "none")
      return std::make_unique<torch::optim::AdamW>(model_->parameters(), adamw);
    return std::make_unique<fsdp::MuonWithAdamW>(
        fsdp::split_for_muon(model_, {.others = {"head.weight"}}), fsdp::MuonOptions(1e-3), adamw);
  }

  void to_device_plainly() {
    model_->to(device_type());
    if (absl::GetFlag(FLAGS_param_dtype) == "bf16") model_->to(torch::kBFloat16);
  }

  void shard(const fsdp::DeviceMesh& mesh) {
    fsdp::FullyShardOptions options;
    if (absl::GetFlag(FLAGS_param_dtype) == "bf16")
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    if (absl::GetFlag(FLAGS_codes)) {
      options.gather_codec_fn = [](const std::string&, const torch::Tensor& weight) {
        return weight.dim() == 2 ? fsdp::mxfp8() : nullptr;
      };
      options.gradient_codecs.shards = fsdp::mxint8();
    }
    if (absl::GetFlag(FLAGS_tp) > 1) {
      const int64_t head_width = absl::GetFlag(FLAGS_width) / programs::TransformerConfig().heads;
      fsdp::parallelize_module(
          model_, mesh["tp"],
          programs::transformer_plan(head_width, absl::GetFlag(FLAGS_sequence_parallel)));
    }
    const bool has_cp = absl::GetFlag(FLAGS_cp) > 1;
    const auto data_mesh = has_cp ? mesh.flatten({"dp", "cp"})["dp_cp"] : mesh["dp"];
    if (absl::GetFlag(FLAGS_muon) == "owners")
      options.shard_placement_fn = [](const std::string&, const torch::Tensor& tensor) {
        return tensor.dim() == 2 ? std::optional<fsdp::Placement>(fsdp::Owned{}) : std::nullopt;
      };
    fsdp::fully_shard(model_->embedding, data_mesh, options);
    for (auto& block : model_->blocks) fsdp::fully_shard(block, data_mesh, options);
    fsdp::fully_shard(model_->head, data_mesh, options);
    fsdp::fully_shard(model_, data_mesh, options);
  }

  programs::Transformer model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor inputs_, targets_, loss_;
};

double timed_step(Training& training) {
  wait_for_device();
  const auto begin = std::chrono::steady_clock::now();
  training.step();
  wait_for_device();
  return seconds_since(begin);
}

// In seconds, one per timed step.
struct Times {
  std::vector<double> steps;
  std::vector<double> beyond_plain;  // empty without a plain model
  std::vector<double> losses;        // of each step, the first ones included
  int64_t bytes_sent = 0;            // per step, by all ranks
};

Times timed_steps(Training& training, Training* plain) {
  Times times;
  int64_t sent_before = 0;
  for (int64_t i = -absl::GetFlag(FLAGS_warmup); i < absl::GetFlag(FLAGS_steps); ++i) {
    if (i == 0) sent_before = bytes_sent();
    const auto of_plain = plain != nullptr ? timed_step(*plain) : 0.0;
    const auto of_step = timed_step(training);
    times.losses.push_back(training.loss());
    if (i < 0) continue;
    times.steps.push_back(of_step);
    if (plain != nullptr) times.beyond_plain.push_back(of_step - of_plain);
  }
  times.bytes_sent = (bytes_sent() - sent_before) / absl::GetFlag(FLAGS_steps);
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
  std::printf("\"bytes_sent\": %lld, \"losses\": [", static_cast<long long>(times.bytes_sent));
  for (size_t i = 0; i < times.losses.size(); ++i)
    std::printf("%s%.9f", i == 0 ? "" : ", ", times.losses[i]);
  std::printf("], \"waiting_seconds\": %.6f}\n", waiting);
}

void run() {
  const auto implementation = absl::GetFlag(FLAGS_implementation);
  TORCH_CHECK_VALUE(
      implementation == "plain" || implementation == "sharded" || implementation == "beside_plain",
      "--implementation: ", implementation, ", allowed are plain, sharded and beside_plain");
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_steps) > 0, "--steps must be positive");
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_device) == "cpu" || absl::GetFlag(FLAGS_device) == "cuda",
                    "--device: ", absl::GetFlag(FLAGS_device), ", allowed are cpu and cuda");
  TORCH_CHECK_VALUE(
      absl::GetFlag(FLAGS_param_dtype) == "f32" || absl::GetFlag(FLAGS_param_dtype) == "bf16",
      "--param_dtype: ", absl::GetFlag(FLAGS_param_dtype), ", allowed are f32 and bf16");
  const auto muon = absl::GetFlag(FLAGS_muon);
  TORCH_CHECK_VALUE(muon == "none" || muon == "rows" || muon == "owners", "--muon: ", muon,
                    ", allowed are none, rows and owners");
  at::set_num_threads(1);
  const auto place = fsdp::launch_environment();
  std::optional<fsdp::DeviceMesh> mesh;
  if (implementation != "plain") {
    fsdp::ProcessGroupOptions options;
    options.backend = absl::GetFlag(FLAGS_backend);
    fsdp::init_process_group(options);
    const int64_t tp = absl::GetFlag(FLAGS_tp), cp = absl::GetFlag(FLAGS_cp);
    mesh = fsdp::init_device_mesh(device_type(), {place.world_size / tp / cp, cp, tp},
                                  {"dp", "cp", "tp"});
  }
  {
    std::optional<Training> plain;
    if (implementation == "beside_plain") plain.emplace(std::nullopt);
    Training training(mesh);
    const auto times = timed_steps(training, plain ? &*plain : nullptr);
    if (place.rank == 0) print_json(times, mesh ? fsdp::counters((*mesh)["dp"]).wait_seconds : 0.0);
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
