// Trains a transformer, sharded, on bytes of real text (C++ headers by default) or on
// files of tokens; from a seed, or from a folder of Hugging Face's.
//
//   train_transformer --ranks 2                 starts two local processes
//   torchrun --nproc-per-node 2 --no-python train_transformer
//   train_transformer --help
#include "examples/batches.h"
#include "examples/hugging_face.h"
#include "examples/launch.h"
#include "examples/text_data.h"
#include "examples/training.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <absl/strings/numbers.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

ABSL_FLAG(
    int64_t, ranks, 2,
    "local processes to start; ignored under torchrun, srun and mpirun, which say it themselves");
ABSL_FLAG(std::string, data, "",
          "text to train on, a file or a folder, or files of tokens (*.bin of nanoGPT, llm.c or "
          "Megatron); default: the LibTorch headers on this machine");
ABSL_FLAG(std::string, init_from, "",
          "folder of Hugging Face's to go on from: config.json and safetensors of a Llama, Mistral "
          "or Qwen2; instead of --width, --blocks, --heads and --kv_heads");
ABSL_FLAG(std::string, export, "",
          "folder to make at the end, which from_pretrained opens; must not be there");
ABSL_FLAG(int64_t, lora, 0,
          "rank of adapters, which are trained instead of the model; --export makes a folder of "
          "them for peft; 0: none");
ABSL_FLAG(double, lora_alpha, 16, "adapters count alpha / rank times");
ABSL_FLAG(std::vector<std::string>, lora_targets, std::vector<std::string>({"query", "value"}),
          "layers that get adapters: query, key, value, output, gate, up, down");
ABSL_FLAG(std::string, lora_base, "bf16", "what the frozen model is in: bf16, f16 or f32");
ABSL_FLAG(int64_t, replicas, 1,
          "hybrid sharding: groups of ranks that hold the same shards; a divisor of the ranks");
ABSL_FLAG(bool, shard_optimizer, false,
          "with replicas: they hold pieces of one optimizer state, not copies of it (HFSDP)");
ABSL_FLAG(std::string, reshard_after_forward, "",
          "true, false, or a number of ranks that share the parameters until backward; "
          "default: true, and false for the root");
ABSL_FLAG(std::string, param_dtype, "", "mixed precision, what modules compute with: bf16 or f16");
ABSL_FLAG(std::string, reduce_dtype, "",
          "what gradients are added up in: bf16, f16 or f32; default: --param_dtype");
ABSL_FLAG(bool, deferred_init, false,
          "build the model without memory, and compute this rank's shards only");
ABSL_FLAG(bool, checkpoint_activations, false,
          "keep the blocks' inputs only, and compute the rest again in backward");
ABSL_FLAG(std::string, mesh, "",
          "replicas x ranks that shard, as 2x2, instead of --ranks and --replicas; with --tp: "
          "ranks that shard x --tp, or replicas x ranks that shard x --tp");
ABSL_FLAG(int64_t, tp, 1,
          "tensor parallelism: ranks that compute one model together; a divisor of the ranks");
ABSL_FLAG(bool, sequence_parallel, false,
          "with --tp: cut what lies between attention and mlp along the tokens");
ABSL_FLAG(int64_t, steps, 300, "training steps");
ABSL_FLAG(int64_t, batch, 8, "sequences per rank and backward");
ABSL_FLAG(int64_t, accumulate, 1, "backwards per step, whose gradients add up");
ABSL_FLAG(int64_t, tokens, 128, "tokens (bytes) per sequence");
ABSL_FLAG(int64_t, width, 128, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks");
ABSL_FLAG(int64_t, heads, 4, "attention heads");
ABSL_FLAG(int64_t, kv_heads, 2, "key and value heads");
ABSL_FLAG(std::string, optimizer, "adamw", "adamw or sgd");
ABSL_FLAG(double, lr, 2e-3, "learning rate");
ABSL_FLAG(int64_t, warmup, 0, "steps in which the learning rate rises");
ABSL_FLAG(std::string, schedule, "constant",
          "of the learning rate after --warmup: constant, or cosine, down to a tenth");
ABSL_FLAG(double, weight_decay, 0.01, "of matrices, by adamw");
ABSL_FLAG(double, clip, 0, "largest norm of the gradients; 0: any");
ABSL_FLAG(std::string, metrics, "", "file to append a line of JSON to after each step");
ABSL_FLAG(std::string, profile, "",
          "file for a trace of steps 2 to 4 of rank 0, which Perfetto opens");
ABSL_FLAG(uint64_t, seed, 1, "seed of the weights, the batches and the generated text");
ABSL_FLAG(int64_t, validate_every, 100,
          "steps between validations; 0: at the start and the end only");
ABSL_FLAG(bool, compare, false,
          "train the unsharded model on the same global batch alongside, and compare");
ABSL_FLAG(std::string, prompt, "#include <",
          "what the generated text starts with; of files of tokens a held-out sequence does");
ABSL_FLAG(int64_t, generate, 200, "tokens to generate at the end; 0: none");
ABSL_FLAG(double, temperature, 0.7, "of the generated text; 0: always the likeliest token");
ABSL_FLAG(
    std::string, checkpoint, "",
    "folder for checkpoints: the last step's, and with --save_every others; the newest 2 stay");
ABSL_FLAG(int64_t, save_every, 0, "steps between checkpoints; 0: after the last step only");
ABSL_FLAG(bool, resume, false,
          "go on from the newest checkpoint in --checkpoint, if there is one; --ranks may differ");
ABSL_FLAG(std::string, device, "cpu", "cpu or cuda, one GPU per local rank");
ABSL_FLAG(int64_t, threads, 1, "threads per rank");

namespace {

examples::OptimizerKind optimizer_kind(const std::string& name) {
  if (name == "adamw") return examples::OptimizerKind::kAdamW;
  TORCH_CHECK_VALUE(name == "sgd", "--optimizer: ", name, ", allowed are adamw and sgd");
  return examples::OptimizerKind::kSgd;
}

c10::DeviceType device_type(const std::string& name) {
  if (name == "cpu") return c10::DeviceType::CPU;
  TORCH_CHECK_VALUE(name == "cuda", "--device: ", name, ", allowed are cpu and cuda");
  TORCH_CHECK_VALUE(at::hasCUDA(), "--device: cuda, but LibTorch finds no CUDA device here");
  return c10::DeviceType::CUDA;
}

int64_t at_least(int64_t least, const absl::Flag<int64_t>& flag) {
  const int64_t value = absl::GetFlag(flag);
  TORCH_CHECK_VALUE(value >= least, "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is ", least, " or more");
  return value;
}

double finite(const absl::Flag<double>& flag) {
  const double value = absl::GetFlag(flag);
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, "--",
                    absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is a number of 0 or more");
  return value;
}

std::string existing_text(std::string path) {
  if (path.empty()) path = examples::default_text_folder();
  TORCH_CHECK_VALUE(std::filesystem::exists(path), "--data: no such file or folder: ", path);
  return path;
}

template <class T>
bool is_given(const absl::Flag<T>& flag) {
  const auto& handle = absl::GetFlagReflectionHandle(flag);
  return handle.CurrentValue() != handle.DefaultValue();
}

// The folder's model, for sequences of --tokens.
examples::TransformerConfig model_from(const std::string& folder) {
  for (const auto* size : {&FLAGS_width, &FLAGS_blocks, &FLAGS_heads, &FLAGS_kv_heads})
    TORCH_CHECK_VALUE(!is_given(*size), "--", absl::GetFlagReflectionHandle(*size).Name(),
                      " and --init_from exclude each other: ", folder, " says what the model is");
  auto model = examples::hugging_face_config(folder);
  const auto tokens = at_least(1, FLAGS_tokens);
  TORCH_CHECK_VALUE(tokens <= model.max_tokens, "--tokens: ", tokens, ", allowed is ",
                    model.max_tokens, " or less, which the model of --init_from was made for");
  return model;
}

examples::TransformerConfig model_from_flags() {
  if (is_given(FLAGS_init_from)) return model_from(absl::GetFlag(FLAGS_init_from));
  const examples::TransformerConfig model = {.width = at_least(1, FLAGS_width),
                                             .blocks = at_least(1, FLAGS_blocks),
                                             .heads = at_least(1, FLAGS_heads),
                                             .kv_heads = at_least(1, FLAGS_kv_heads),
                                             .max_tokens = at_least(1, FLAGS_tokens)};
  TORCH_CHECK_VALUE(model.width % (2 * model.heads) == 0, "--width: ", model.width,
                    ", allowed are multiples of ", 2 * model.heads, ", twice --heads");
  TORCH_CHECK_VALUE(model.heads % model.kv_heads == 0, "--kv_heads: ", model.kv_heads,
                    ", allowed are divisors of --heads, ", model.heads);
  return model;
}

examples::Decay decay() {
  const std::string name = absl::GetFlag(FLAGS_schedule);
  if (name == "cosine") return examples::Decay::kCosine;
  TORCH_CHECK_VALUE(name == "constant", "--schedule: ", name, ", allowed are constant and cosine");
  return examples::Decay::kNone;
}

std::optional<at::ScalarType> dtype(const absl::Flag<std::string>& flag) {
  const std::string name = absl::GetFlag(flag);
  if (name.empty()) return std::nullopt;
  if (name == "bf16") return at::kBFloat16;
  if (name == "f16") return at::kHalf;
  TORCH_CHECK_VALUE(name == "f32", "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", name,
                    ", allowed are bf16, f16 and f32");
  return at::kFloat;
}

examples::LoraOptions lora_options() {
  const examples::LoraOptions lora{.rank = at_least(0, FLAGS_lora),
                                   .alpha = finite(FLAGS_lora_alpha),
                                   .targets = absl::GetFlag(FLAGS_lora_targets),
                                   .frozen_dtype = *dtype(FLAGS_lora_base)};
  TORCH_CHECK_VALUE(lora.rank == 0 || absl::GetFlag(FLAGS_tp) == 1,
                    "--lora and --tp exclude each other: the plan does not cut adapters");
  TORCH_CHECK_VALUE(lora.rank == 0 || !absl::GetFlag(FLAGS_compare),
                    "--lora and --compare exclude each other: the unsharded model has no adapters");
  return lora;
}

std::string new_folder_for_export() {
  const std::string folder = absl::GetFlag(FLAGS_export);
  TORCH_CHECK_VALUE(folder.empty() || !std::filesystem::exists(folder), "--export: ", folder,
                    " is there already");
  return folder;
}

struct JobShape {
  int64_t ranks, replicas;
};

// "2x2x2"; empty for any other text.
std::vector<int64_t> sizes_of(const std::string& mesh) {
  std::vector<int64_t> sizes;
  std::istringstream parts(mesh);
  for (std::string part; std::getline(parts, part, 'x');) {
    int64_t size = 0;
    if (!absl::SimpleAtoi(part, &size) || size <= 0) return {};
    sizes.push_back(size);
  }
  return sizes;
}

JobShape job_shape() {
  const std::string mesh = absl::GetFlag(FLAGS_mesh);
  const int64_t tp = at_least(1, FLAGS_tp);
  TORCH_CHECK_VALUE(tp > 1 || !absl::GetFlag(FLAGS_sequence_parallel),
                    "--sequence_parallel needs --tp of 2 or more");
  if (mesh.empty()) return {at_least(1, FLAGS_ranks), at_least(1, FLAGS_replicas)};
  const auto sizes = sizes_of(mesh);
  const bool valid = sizes.size() == 2 || (sizes.size() == 3 && tp > 1);
  TORCH_CHECK_VALUE(valid, "--mesh: ", mesh, ", allowed are two numbers, as 2x2",
                    tp > 1 ? ", or three, as 2x2x2" : "");
  TORCH_CHECK_VALUE(tp == 1 || sizes.back() == tp, "--mesh: ", mesh,
                    ", whose last number must be --tp, ", tp);
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_replicas) == 1,
                    "--mesh and --replicas exclude each other: the first number is the replicas");
  int64_t ranks = 1;
  for (const int64_t size : sizes) ranks *= size;
  return {ranks, sizes.size() == 2 && tp > 1 ? 1 : sizes.front()};
}

std::optional<fsdp::ReshardAfterForward> reshard_after_forward() {
  const std::string value = absl::GetFlag(FLAGS_reshard_after_forward);
  if (value.empty()) return std::nullopt;
  if (value == "true") return true;
  if (value == "false") return false;
  int64_t ranks = 0;
  TORCH_CHECK_VALUE(absl::SimpleAtoi(value, &ranks), "--reshard_after_forward: ", value,
                    ", allowed are true, false and a number of ranks");
  return fsdp::ReshardAfterForward::to_world(ranks);
}

fsdp::FullyShardOptions sharding_options() {
  fsdp::FullyShardOptions options{.reshard_after_forward = reshard_after_forward(),
                                  .mp_policy = {.param_dtype = dtype(FLAGS_param_dtype),
                                                .reduce_dtype = dtype(FLAGS_reduce_dtype)}};
  const auto& precision = options.mp_policy;
  TORCH_CHECK_VALUE(
      (!precision.param_dtype && !precision.reduce_dtype) || !absl::GetFlag(FLAGS_compare),
      "--compare and --param_dtype or --reduce_dtype exclude each other: the "
      "unsharded model is trained in float");
  if (absl::GetFlag(FLAGS_shard_optimizer)) options.outer = fsdp::Outer::kShardOptimizer;
  return options;
}

examples::CheckpointOptions checkpoint_options() {
  examples::CheckpointOptions options{.folder = absl::GetFlag(FLAGS_checkpoint),
                                      .every = at_least(0, FLAGS_save_every),
                                      .resume = absl::GetFlag(FLAGS_resume)};
  TORCH_CHECK_VALUE(!options.folder.empty() || (options.every == 0 && !options.resume),
                    "--save_every and --resume need --checkpoint, the folder");
  TORCH_CHECK_VALUE(!options.resume || !absl::GetFlag(FLAGS_compare),
                    "--resume and --compare exclude each other: the unsharded model is not saved");
  return options;
}

examples::TrainingOptions options_from_flags() {
  examples::TrainingOptions options;
  options.data = existing_text(absl::GetFlag(FLAGS_data));
  options.init_from = absl::GetFlag(FLAGS_init_from);
  options.model = model_from_flags();
  options.lora = lora_options();
  options.export_to = new_folder_for_export();
  options.replicas = job_shape().replicas;
  options.tp = at_least(1, FLAGS_tp);
  options.sequence_parallel = absl::GetFlag(FLAGS_sequence_parallel);
  options.sharding = sharding_options();
  options.deferred_init = absl::GetFlag(FLAGS_deferred_init);
  options.checkpoint_activations = absl::GetFlag(FLAGS_checkpoint_activations);
  options.batch = at_least(1, FLAGS_batch);
  options.accumulate = at_least(1, FLAGS_accumulate);
  options.tokens = at_least(1, FLAGS_tokens);
  options.steps = at_least(1, FLAGS_steps);
  options.optimizer = optimizer_kind(absl::GetFlag(FLAGS_optimizer));
  options.lr = finite(FLAGS_lr);
  options.warmup = at_least(0, FLAGS_warmup);
  options.decay = decay();
  options.weight_decay = finite(FLAGS_weight_decay);
  options.clip = finite(FLAGS_clip);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.validate_every = at_least(0, FLAGS_validate_every);
  options.compare = absl::GetFlag(FLAGS_compare);
  TORCH_CHECK_VALUE(!options.compare || (options.accumulate == 1 && options.clip == 0),
                    "--compare and --accumulate or --clip exclude each other: the unsharded model "
                    "takes plain steps");
  options.metrics = absl::GetFlag(FLAGS_metrics);
  options.profile = absl::GetFlag(FLAGS_profile);
  options.prompt = absl::GetFlag(FLAGS_prompt);
  TORCH_CHECK_VALUE(!options.prompt.empty(), "--prompt: must not be empty");
  options.generate = at_least(0, FLAGS_generate);
  options.temperature = finite(FLAGS_temperature);
  options.device = device_type(absl::GetFlag(FLAGS_device));
  options.checkpoints = checkpoint_options();
  return options;
}

void refuse_further_arguments(const std::vector<char*>& left) {
  TORCH_CHECK_VALUE(left.size() <= 1, "unexpected argument '", left[1],
                    "': text to train on is named by --data; --help lists the flags");
}

// A full disk, or a reader that is gone, must not look like success.
int after_output(int exit_code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  std::cerr << "what was printed could not be written (a full disk?)" << std::endl;
  return 1;
}

// What every rank would find wrong.
void check_job(const examples::TrainingOptions& options, int64_t ranks) {
  examples::check_mesh(options, ranks);
  examples::Batches(examples::tokens_of(options.data),
                    {.seed = options.seed, .tokens = options.tokens, .vocab = options.model.vocab})
      .training(/*step=*/1, {.first = 0, .count = 1, .global = 1});
}

int run(const std::vector<char*>& left) {
  refuse_further_arguments(left);
  const auto options = options_from_flags();
  const auto threads = static_cast<int>(at_least(1, FLAGS_threads));
  const auto ranks = job_shape().ranks;
  const auto exit_code = examples::launch_ranks(ranks, [&] { check_job(options, ranks); });
  if (exit_code) return *exit_code;
  at::set_num_threads(threads);
  return after_output(examples::train(options));
}

// --help shows the flags of this file.
void show_own_flags_in_help() {
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return std::string(file).find("train_transformer.cc") != std::string::npos;
  };
  absl::SetFlagsUsageConfig(config);
}

// Abseil ends the program with 1 after --help.
void end_help_with_success(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) != "--help") continue;
    std::atexit([] {
      std::cout.flush();
      std::_Exit(0);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a transformer, sharded over the ranks, on real text or tokens, and lets it write "
      "some.\n"
      "Usage: train_transformer [--ranks=2] [--steps=300] [--compare] ...");
  show_own_flags_in_help();
  end_help_with_success(argc, argv);
  const auto left = absl::ParseCommandLine(argc, argv);
  try {
    return run(left);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}
