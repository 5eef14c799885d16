// Trains a transformer, sharded, on bytes of real text (C++ headers by default) or on
// files of tokens; from a seed, or from a folder of Hugging Face's.
//
//   train_transformer --ranks 2                 starts two local processes
//   torchrun --nproc-per-node 2 --no-python train_transformer
//   train_transformer --help
#include "programs/command_line.h"
#include "programs/job_flags.h"
#include "programs/trainer/data/text_data.h"
#include "programs/trainer/hugging_face/hugging_face.h"
#include "programs/trainer/launch.h"
#include "programs/trainer/report/run_page.h"
#include "programs/trainer/setup/sharded_model.h"
#include "programs/trainer/setup/training_data.h"
#include "programs/trainer/training.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <absl/flags/flag.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

ABSL_FLAG(
    std::string, data, "",
    "text to train on, a file or a folder, as bytes or by the tokenizer.model of --init_from, "
    "or files of tokens (*.bin of nanoGPT, llm.c or Megatron); default: the LibTorch headers "
    "on this machine");
ABSL_FLAG(std::string, documents, "joined",
          "what the documents in one sequence are to each other: joined, or separate, which gives "
          "each positions and attention of its own, and takes no loss across an end");
ABSL_FLAG(int64_t, end_of_document, -1,
          "with --documents=separate: the last token of each document, such as GPT-2's 50256, in "
          "files of tokens; those with an index of Megatron's need none");
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
ABSL_FLAG(
    std::string, lora_base, "bf16",
    "what the frozen model is in: bf16, f16 or f32; or nf4 (QLoRA), its matrices as codes of 4 "
    "bits, of which it computes in bf16");
ABSL_FLAG(bool, deferred_init, false,
          "build the model without memory, and compute this rank's shards only");
ABSL_FLAG(int64_t, steps, 300, "training steps");
ABSL_FLAG(int64_t, tokens, 128, "tokens (bytes) per sequence");
ABSL_FLAG(int64_t, width, 128, "width of the model");
ABSL_FLAG(int64_t, blocks, 4, "transformer blocks");
ABSL_FLAG(int64_t, heads, 4, "attention heads");
ABSL_FLAG(int64_t, kv_heads, 2, "key and value heads");
ABSL_FLAG(int64_t, experts, 0, "of each block, a mixture; 0: one SwiGLU");
ABSL_FLAG(int64_t, experts_per_token, 2, "with --experts: how many compute a token");
ABSL_FLAG(double, lr, 2e-3, "learning rate");
ABSL_FLAG(int64_t, warmup, 0, "steps in which the learning rate rises");
ABSL_FLAG(std::string, schedule, "constant",
          "of the learning rate after --warmup: constant, or cosine, down to a tenth");
ABSL_FLAG(double, weight_decay, 0.01, "of matrices, by adamw");
ABSL_FLAG(std::string, metrics, "", "file to append a line of JSON to after each step");
ABSL_FLAG(std::string, profile, "",
          "file for a trace of steps 2 to 4 of rank 0, which Perfetto opens");
ABSL_FLAG(
    std::string, report, "",
    "file for a page about the run: loss, throughput, a step of every rank, memory, units and "
    "advice; a browser opens it");
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

using programs::at_least;
using programs::finite;
using programs::is_given;

c10::DeviceType device_type(const std::string& name) {
  if (name == "cpu") return c10::DeviceType::CPU;
  TORCH_CHECK_VALUE(name == "cuda", "--device: ", name, ", allowed are cpu and cuda");
  TORCH_CHECK_VALUE(at::hasCUDA(), "--device: cuda, but LibTorch finds no CUDA device here");
  return c10::DeviceType::CUDA;
}

std::string existing_text(std::string path) {
  if (path.empty()) path = programs::default_text_folder();
  TORCH_CHECK_VALUE(std::filesystem::exists(path), "--data: no such file or folder: ", path);
  return path;
}

programs::Packing packing() {
  const std::string name = absl::GetFlag(FLAGS_documents);
  if (name == "separate") return programs::Packing::kSeparate;
  TORCH_CHECK_VALUE(name == "joined", "--documents: ", name, ", allowed are joined and separate");
  return programs::Packing::kJoined;
}

// The folder's model, for sequences of --tokens.
programs::TransformerConfig model_from(const std::string& folder) {
  for (const auto* size :
       {&FLAGS_width, &FLAGS_blocks, &FLAGS_heads, &FLAGS_kv_heads, &FLAGS_experts})
    TORCH_CHECK_VALUE(!is_given(*size), "--", absl::GetFlagReflectionHandle(*size).Name(),
                      " and --init_from exclude each other: ", folder, " says what the model is");
  auto model = programs::hugging_face_config(folder);
  const auto tokens = at_least(1, FLAGS_tokens);
  TORCH_CHECK_VALUE(tokens <= model.max_tokens, "--tokens: ", tokens, ", allowed is ",
                    model.max_tokens, " or less, which the model of --init_from was made for");
  return model;
}

programs::TransformerConfig model_from_flags() {
  if (is_given(FLAGS_init_from)) return model_from(absl::GetFlag(FLAGS_init_from));
  const programs::TransformerConfig model = {
      .width = at_least(1, FLAGS_width),
      .blocks = at_least(1, FLAGS_blocks),
      .heads = at_least(1, FLAGS_heads),
      .kv_heads = at_least(1, FLAGS_kv_heads),
      .max_tokens = at_least(1, FLAGS_tokens),
      .mixture = {.experts = at_least(0, FLAGS_experts),
                  .per_token = at_least(1, FLAGS_experts_per_token)}};
  TORCH_CHECK_VALUE(model.width % (2 * model.heads) == 0, "--width: ", model.width,
                    ", allowed are multiples of ", 2 * model.heads, ", twice --heads");
  TORCH_CHECK_VALUE(model.heads % model.kv_heads == 0, "--kv_heads: ", model.kv_heads,
                    ", allowed are divisors of --heads, ", model.heads);
  const auto& mixture = model.mixture;
  TORCH_CHECK_VALUE(mixture.experts == 0 || mixture.per_token <= mixture.experts,
                    "--experts_per_token: ", mixture.per_token, ", allowed are 1 to --experts, ",
                    mixture.experts);
  return model;
}

std::optional<int64_t> end_of_document(int64_t vocab) {
  if (!is_given(FLAGS_end_of_document)) return std::nullopt;
  const auto token = at_least(0, FLAGS_end_of_document);
  TORCH_CHECK_VALUE(packing() == programs::Packing::kSeparate,
                    "--end_of_document needs --documents=separate");
  TORCH_CHECK_VALUE(token < vocab, "--end_of_document: ", token, ", allowed is less than ", vocab,
                    ", the vocabulary");
  return token;
}

programs::Decay decay() {
  const std::string name = absl::GetFlag(FLAGS_schedule);
  if (name == "cosine") return programs::Decay::kCosine;
  TORCH_CHECK_VALUE(name == "constant", "--schedule: ", name, ", allowed are constant and cosine");
  return programs::Decay::kNone;
}

// Those of a block.
const std::vector<std::string>& lora_layers() {
  static const std::vector<std::string> layers = {"query", "key", "value", "output",
                                                  "gate",  "up",  "down"};
  return layers;
}

programs::LoraOptions lora_options() {
  const bool stores_nf4 = absl::GetFlag(FLAGS_lora_base) == "nf4";
  const programs::LoraOptions lora{
      .rank = at_least(0, FLAGS_lora),
      .alpha = finite(FLAGS_lora_alpha),
      .targets = absl::GetFlag(FLAGS_lora_targets),
      .frozen_dtype = stores_nf4 ? at::kBFloat16 : *programs::dtype(FLAGS_lora_base),
      .stores_nf4 = stores_nf4};
  TORCH_CHECK_VALUE(!stores_nf4 || lora.rank > 0,
                    "--lora_base: nf4 needs --lora, the rank of what is trained");
  const auto& layers = lora_layers();
  for (const auto& target : lora.targets)
    TORCH_CHECK_VALUE(std::find(layers.begin(), layers.end(), target) != layers.end(),
                      "--lora_targets: ", target, ", allowed are ", c10::Join(", ", layers));
  TORCH_CHECK_VALUE(lora.rank == 0 || !absl::GetFlag(FLAGS_compare),
                    "--lora and --compare exclude each other: the unsharded model has no adapters");
  return lora;
}

// So that the places of tokens in a step are numbers.
void check_size(const programs::TrainingOptions& options) {
  constexpr int64_t kMostTokens = int64_t{1} << 31, kMostBackwards = int64_t{1} << 20;
  TORCH_CHECK_VALUE(options.batch <= kMostTokens / options.tokens, "--batch: ", options.batch,
                    ", allowed with --tokens ", options.tokens, " are ",
                    kMostTokens / options.tokens, " or less");
  TORCH_CHECK_VALUE(options.accumulate <= kMostBackwards, "--accumulate: ", options.accumulate,
                    ", allowed are ", kMostBackwards, " or less");
}

programs::CheckpointOptions checkpoint_options() {
  programs::CheckpointOptions options{.folder = absl::GetFlag(FLAGS_checkpoint),
                                      .every = at_least(0, FLAGS_save_every),
                                      .resume = absl::GetFlag(FLAGS_resume)};
  TORCH_CHECK_VALUE(!options.folder.empty() || (options.every == 0 && !options.resume),
                    "--save_every and --resume need --checkpoint, the folder");
  TORCH_CHECK_VALUE(!options.resume || !absl::GetFlag(FLAGS_compare),
                    "--resume and --compare exclude each other: the unsharded model is not saved");
  return options;
}

programs::TrainingOptions options_from_flags() {
  programs::TrainingOptions options;
  programs::set_job_options(options);
  options.data = existing_text(absl::GetFlag(FLAGS_data));
  options.init_from = absl::GetFlag(FLAGS_init_from);
  options.model = model_from_flags();
  options.packing = packing();
  options.end_of_document = end_of_document(options.model.vocab);
  options.lora = lora_options();
  options.export_to = absl::GetFlag(FLAGS_export);
  options.deferred_init = absl::GetFlag(FLAGS_deferred_init);
  options.tokens = at_least(1, FLAGS_tokens);
  check_size(options);
  options.steps = at_least(1, FLAGS_steps);
  options.lr = finite(FLAGS_lr);
  options.warmup = at_least(0, FLAGS_warmup);
  options.decay = decay();
  options.weight_decay = finite(FLAGS_weight_decay);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.validate_every = at_least(0, FLAGS_validate_every);
  options.compare = absl::GetFlag(FLAGS_compare);
  const auto& precision = options.sharding.mp_policy;
  TORCH_CHECK_VALUE((!precision.param_dtype && !precision.reduce_dtype) || !options.compare,
                    "--compare and --param_dtype or --reduce_dtype exclude each other: the "
                    "unsharded model is trained in float");
  const bool has_codecs =
      options.sharding.gather_codec_fn || options.sharding.gradient_codecs.shards;
  TORCH_CHECK_VALUE(!has_codecs || !options.compare,
                    "--compare and --gather_codec or --reduce_codec exclude each other: the "
                    "unsharded model has no codes");
  TORCH_CHECK_VALUE(!options.lora.stores_nf4 || options.tp == 1,
                    "--lora_base=nf4 and --tp exclude each other: codes of a part are not those of "
                    "the whole");
  TORCH_CHECK_VALUE(!options.compare || (options.accumulate == 1 && options.clip == 0),
                    "--compare and --accumulate or --clip exclude each other: the unsharded model "
                    "takes plain steps");
  options.metrics = absl::GetFlag(FLAGS_metrics);
  options.profile = absl::GetFlag(FLAGS_profile);
  options.report = absl::GetFlag(FLAGS_report);
  options.prompt = absl::GetFlag(FLAGS_prompt);
  TORCH_CHECK_VALUE(!options.prompt.empty(), "--prompt: must not be empty");
  options.generate = at_least(0, FLAGS_generate);
  options.temperature = finite(FLAGS_temperature);
  options.device = device_type(absl::GetFlag(FLAGS_device));
  options.checkpoints = checkpoint_options();
  return options;
}

// What every rank would find wrong.
void check_job(const programs::TrainingOptions& options, int64_t ranks) {
  programs::check_mesh(options, ranks);
  programs::check_files_of_page(options, ranks);
  programs::check_output_files(options);
  programs::batches_for(options, programs::tokenizer_for(options).get())
      .training(/*step=*/1, {.first = 0, .count = 1, .global = 1});
}

int run() {
  const auto options = options_from_flags();
  const auto threads = static_cast<int>(at_least(1, FLAGS_threads));
  const auto ranks = programs::job_shape().ranks;
  const auto exit_code = programs::launch_ranks(ranks, [&] { check_job(options, ranks); });
  if (exit_code) return *exit_code;
  at::set_num_threads(threads);
  return programs::train(options);
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program(
      argc, argv,
      {.usage = "trains a transformer, sharded over the ranks, on real text or tokens, and lets it "
                "write some.\n"
                "Usage: train_transformer [--ranks=2] [--steps=300] [--compare] ...",
       .flags_of = {"train_transformer.cc", "job_flags.cc"},
       .about_arguments = "text to train on is named by --data",
       .run = run});
}
