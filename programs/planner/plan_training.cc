// Tells what a training job would take, before it is paid for: memory of a rank,
// collectives and bytes of a step, for any number of ranks, in this process and in
// seconds. See planned_step.h for how.
//
//   plan_training --config llama-8b --mesh 4x8 --param_dtype bf16
//   plan_training --config FOLDER --ranks 64 --fit 80
//   plan_training --help
#include "fake_device/fake_device.h"
#include "programs/command_line.h"
#include "programs/job_flags.h"
#include "programs/planner/model_sizes.h"
#include "programs/planner/plan_text.h"
#include "programs/planner/planned_step.h"
#include "programs/planner/policy_search.h"
#include "programs/trainer/hugging_face/hugging_face_config.h"
#include "programs/trainer/setup/sharded_model.h"

#include <absl/flags/flag.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

ABSL_FLAG(std::string, config, "llama-8b",
          "the model: a folder with a config.json of Hugging Face's, or llama-8b, llama-70b, "
          "llama-405b");
ABSL_FLAG(int64_t, tokens, 0, "tokens per sequence; 0: 8192, or as many as the model was made for");
ABSL_FLAG(int64_t, rank, 0, "the rank to plan; rank 0 has the largest shards");
ABSL_FLAG(int64_t, ranks_per_node, 8, "ranks that are on one machine");
ABSL_FLAG(std::string, attention, "fused",
          "fused: one operator that keeps no scores, as on CUDA; composed: products and a softmax");
ABSL_FLAG(double, fit, 0,
          "GiB of a device: plans many ways to shard (replicas, tensor parallelism, resharding, "
          "recomputation) and tells which fit and receive least; 0: plans the flags' one");
ABSL_FLAG(double, tflops, 400, "TFLOP/s that products of matrices reach, for the estimate");
ABSL_FLAG(double, node_bandwidth, 400, "GB/s that a rank receives within a node, for the estimate");
ABSL_FLAG(double, network_bandwidth, 40,
          "GB/s that a rank receives from other nodes, for the estimate");
ABSL_FLAG(bool, json, false, "print one line of JSON, in bytes");

namespace {

using programs::at_least;
using programs::is_given;
using programs::kGiB;
using programs::MeasuredStep;
using programs::PlannedJobText;
using programs::PlannedPolicy;
using programs::ShardingPolicy;
using programs::TrainingOptions;

double positive(const absl::Flag<double>& flag) {
  const double value = programs::finite(flag);
  TORCH_CHECK_VALUE(value > 0, "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is a number above 0");
  return value;
}

programs::MachineRates rates() {
  return {.flops_per_second = positive(FLAGS_tflops) * 1e12,
          .node_bytes_per_second = positive(FLAGS_node_bandwidth) * 1e9,
          .network_bytes_per_second = positive(FLAGS_network_bandwidth) * 1e9};
}

programs::TransformerConfig model() {
  const std::string config = absl::GetFlag(FLAGS_config);
  return checked(std::filesystem::is_directory(config) ? programs::hugging_face_config(config)
                                                       : programs::model_called(config));
}

int64_t tokens_for(const programs::TransformerConfig& sizes) {
  constexpr int64_t kUsual = 8192;
  const auto tokens = at_least(0, FLAGS_tokens);
  TORCH_CHECK_VALUE(tokens <= sizes.max_tokens, "--tokens: ", tokens, ", allowed is ",
                    sizes.max_tokens, " or less, which the model was made for");
  return tokens > 0 ? tokens : std::min(kUsual, sizes.max_tokens);
}

TrainingOptions options_from_flags() {
  TrainingOptions options;
  options.model = model();
  options.tokens = tokens_for(options.model);
  programs::set_job_options(options);
  return options;
}

fsdp::FakeAttention attention() {
  const std::string name = absl::GetFlag(FLAGS_attention);
  if (name == "fused") return fsdp::FakeAttention::kFused;
  TORCH_CHECK_VALUE(name == "composed", "--attention: ", name, ", allowed are fused and composed");
  return fsdp::FakeAttention::kComposed;
}

programs::PlannedJob planned_job() {
  const programs::PlannedJob job{.ranks = programs::job_shape().ranks,
                                 .rank = at_least(0, FLAGS_rank)};
  TORCH_CHECK_VALUE(job.rank < job.ranks, "--rank: ", job.rank, ", allowed is less than ",
                    job.ranks, ", the number of ranks");
  return job;
}

PlannedJobText text_for(const TrainingOptions& options, const MeasuredStep& step) {
  const auto job = planned_job();
  const int64_t sequences =
      options.batch * options.accumulate * (job.ranks / options.tp / options.cp);
  return {.mesh = mesh_dims(options, job.ranks),
          .rank = job.rank,
          .ranks_per_node = at_least(1, FLAGS_ranks_per_node),
          .tokens = static_cast<double>(sequences * options.tokens),
          .parameters = step.unsharded_bytes / 4,
          .recomputes = options.checkpoint_activations,
          .rates = rates()};
}

void plan_one(TrainingOptions options) {
  const auto step = plan_step(options, planned_job());
  auto text = text_for(options, step);
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("%s", json_of(step, text).c_str());
    return;
  }
  options.checkpoint_activations = !options.checkpoint_activations;
  text.otherwise = plan_step(options, planned_job()).memory;
  std::printf("%s", text_of(step, text).c_str());
}

TrainingOptions with(TrainingOptions options, const ShardingPolicy& policy) {
  options.replicas = policy.replicas;
  options.tp = policy.tp;
  if (policy.replicas == 1) options.sharding.outer = fsdp::Outer::kReplicate;
  options.checkpoint_activations = policy.activations == programs::Activations::kRecomputed;
  switch (policy.reshard) {
    case programs::Reshard::kAfterForward:
      options.sharding.reshard_after_forward = std::nullopt;
      break;
    case programs::Reshard::kKeep:
      options.sharding.reshard_after_forward = false;
      break;
    case programs::Reshard::kToNode:
      options.sharding.reshard_after_forward =
          fsdp::ReshardAfterForward::to_world(absl::GetFlag(FLAGS_ranks_per_node) / policy.tp);
      break;
  }
  return options;
}

PlannedPolicy plan(const TrainingOptions& base, const ShardingPolicy& policy) {
  const auto options = with(base, policy);
  const auto step = plan_step(options, planned_job());
  const auto text = text_for(options, step);
  const auto& memory = step.memory;
  return {.policy = policy,
          .peak_bytes = static_cast<double>(memory.peak),
          .resident_bytes =
              static_cast<double>(memory.parameters + memory.gradients + memory.optimizer),
          .received = link_bytes(step, text),
          .flops = step.flops,
          .tokens = text.tokens};
}

void print_what_is_smallest(const std::vector<PlannedPolicy>& planned) {
  const auto least = smallest(planned);
  std::printf(
      "nothing fits; the smallest takes %.2f GiB: %s\n"
      "with parameters, gradients and optimizer offloaded to the CPU (estimate): %.2f GiB\n",
      least->peak_bytes / kGiB, to_string(least->policy).c_str(),
      (least->peak_bytes - least->resident_bytes) / kGiB);
}

// What is searched for cannot be given.
template <class T>
void refuse_with_fit(const absl::Flag<T>& flag) {
  TORCH_CHECK_VALUE(!is_given(flag), "--", absl::GetFlagReflectionHandle(flag).Name(),
                    " and --fit exclude each other");
}

void plan_to_fit(const TrainingOptions& options, double bytes) {
  refuse_with_fit(FLAGS_json);
  refuse_with_fit(FLAGS_mesh);
  refuse_with_fit(FLAGS_replicas);
  refuse_with_fit(FLAGS_tp);
  refuse_with_fit(FLAGS_reshard_after_forward);
  refuse_with_fit(FLAGS_checkpoint_activations);
  const auto policies =
      programs::policies_to_plan({.ranks = planned_job().ranks,
                                  .ranks_per_node = at_least(1, FLAGS_ranks_per_node),
                                  .kv_heads = options.model.kv_heads});
  std::vector<PlannedPolicy> planned;
  for (const auto& policy : policies) {
    // What fits without is not recomputed.
    const bool is_needed =
        policy.activations == programs::Activations::kKept || planned.back().peak_bytes > bytes;
    if (is_needed) planned.push_back(plan(options, policy));
  }
  const auto fit = fitting(planned, bytes, rates());
  std::printf("planned %zu ways to shard, %zu fit\n", planned.size(), fit.size());
  if (fit.empty()) return print_what_is_smallest(planned);
  std::printf("%s", text_of_fit(fit, rates()).c_str());
}

int run() {
  const auto options = options_from_flags();
  fsdp::set_fake_attention(attention());
  const double fit = programs::finite(FLAGS_fit);
  if (fit > 0) {
    plan_to_fit(options, fit * kGiB);
  } else {
    plan_one(options);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program(
      argc, argv,
      {.usage = "tells what a training job would take: memory, collectives and bytes.\n"
                "Usage: plan_training [--config=llama-8b] [--ranks=8] [--fit=80] ...",
       .flags_of = {"plan_training.cc", "job_flags.cc"},
       .about_arguments = "the model is named by --config",
       .run = run});
}
