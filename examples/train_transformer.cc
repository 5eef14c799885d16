// Trains a byte-level transformer, sharded, on real text: C++ headers by default.
//
//   train_transformer --ranks 2                 starts two local processes
//   torchrun --nproc-per-node 2 --no-python train_transformer
//   train_transformer --help
#include "examples/launch.h"
#include "examples/text_data.h"
#include "examples/training.h"

#include <ATen/Parallel.h>
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>

#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

ABSL_FLAG(
    int64_t, ranks, 2,
    "local processes to start; ignored under torchrun, srun and mpirun, which say it themselves");
ABSL_FLAG(std::string, data, "",
          "text to train on, a file or a folder; default: the LibTorch headers on this machine");
ABSL_FLAG(int64_t, steps, 300, "training steps");
ABSL_FLAG(int64_t, batch, 8, "sequences per rank and step");
ABSL_FLAG(int64_t, tokens, 128, "tokens (bytes) per sequence");
ABSL_FLAG(int64_t, width, 128, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks");
ABSL_FLAG(int64_t, heads, 4, "attention heads");
ABSL_FLAG(int64_t, kv_heads, 2, "key and value heads");
ABSL_FLAG(std::string, optimizer, "adamw", "adamw or sgd");
ABSL_FLAG(double, lr, 2e-3, "learning rate");
ABSL_FLAG(uint64_t, seed, 1, "seed of the weights, the batches and the generated text");
ABSL_FLAG(int64_t, validate_every, 100,
          "steps between validations; 0: at the start and the end only");
ABSL_FLAG(bool, compare, false,
          "train the unsharded model on the same global batch alongside, and compare");
ABSL_FLAG(std::string, prompt, "#include <", "what the generated text starts with");
ABSL_FLAG(int64_t, generate, 200, "tokens to generate at the end; 0: none");
ABSL_FLAG(double, temperature, 0.7, "of the generated text; 0: always the likeliest token");
ABSL_FLAG(std::string, device, "cpu", "cpu or cuda, one GPU per local rank");
ABSL_FLAG(int, threads, 1, "threads per rank");

namespace {

examples::OptimizerKind optimizer_kind(const std::string& name) {
  if (name == "adamw") return examples::OptimizerKind::kAdamW;
  TORCH_CHECK_VALUE(name == "sgd", "--optimizer: ", name, ", allowed are adamw and sgd");
  return examples::OptimizerKind::kSgd;
}

c10::DeviceType device_type(const std::string& name) {
  if (name == "cpu") return c10::DeviceType::CPU;
  TORCH_CHECK_VALUE(name == "cuda", "--device: ", name, ", allowed are cpu and cuda");
  return c10::DeviceType::CUDA;
}

int64_t at_least(int64_t least, const absl::Flag<int64_t>& flag) {
  const int64_t value = absl::GetFlag(flag);
  TORCH_CHECK_VALUE(value >= least, "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is ", least, " or more");
  return value;
}

examples::TrainingOptions options_from_flags() {
  examples::TrainingOptions options;
  options.data = absl::GetFlag(FLAGS_data);
  if (options.data.empty()) options.data = examples::default_text_folder();
  options.model = {.width = at_least(1, FLAGS_width),
                   .blocks = at_least(1, FLAGS_blocks),
                   .heads = at_least(1, FLAGS_heads),
                   .kv_heads = at_least(1, FLAGS_kv_heads),
                   .max_tokens = at_least(1, FLAGS_tokens)};
  options.batch = at_least(1, FLAGS_batch);
  options.tokens = options.model.max_tokens;
  options.steps = at_least(1, FLAGS_steps);
  options.optimizer = optimizer_kind(absl::GetFlag(FLAGS_optimizer));
  options.lr = absl::GetFlag(FLAGS_lr);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.validate_every = at_least(0, FLAGS_validate_every);
  options.compare = absl::GetFlag(FLAGS_compare);
  options.prompt = absl::GetFlag(FLAGS_prompt);
  TORCH_CHECK_VALUE(!options.prompt.empty(), "--prompt: must not be empty");
  options.generate = at_least(0, FLAGS_generate);
  options.temperature = absl::GetFlag(FLAGS_temperature);
  options.device = device_type(absl::GetFlag(FLAGS_device));
  return options;
}

int run() {
  const auto options =
      options_from_flags();  // first: a wrong flag is reported once, not by every rank
  if (auto exit_code = examples::launch_ranks(at_least(1, FLAGS_ranks))) return *exit_code;
  at::set_num_threads(absl::GetFlag(FLAGS_threads));
  return examples::train(options);
}

// --help shows the flags of this file.
void show_own_flags_in_help() {
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return std::string(file).find("train_transformer.cc") != std::string::npos;
  };
  absl::SetFlagsUsageConfig(config);
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a byte-level transformer, sharded over the ranks, on real text, and lets it write "
      "some.\n"
      "Usage: train_transformer [--ranks=2] [--steps=300] [--compare] ...");
  show_own_flags_in_help();
  absl::ParseCommandLine(argc, argv);
  try {
    return run();
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}
