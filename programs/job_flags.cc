#include "programs/job_flags.h"

#include "programs/command_line.h"

#include <absl/flags/flag.h>
#include <absl/strings/numbers.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

ABSL_FLAG(
    int64_t, ranks, 2,
    "ranks of the job: local processes to start, but under torchrun, srun and mpirun, which say "
    "it themselves");
ABSL_FLAG(int64_t, replicas, 1,
          "hybrid sharding: groups of ranks that hold the same shards; a divisor of the ranks");
ABSL_FLAG(bool, shard_optimizer, false,
          "with replicas: they hold pieces of one optimizer state, not copies of it (HFSDP)");
ABSL_FLAG(std::string, units, "blocks",
          "what becomes a unit: blocks, with embedding and head; layers, each for itself; or root, "
          "the whole model as one");
ABSL_FLAG(std::string, reshard_after_forward, "",
          "true, false, or a number of ranks that share the parameters until backward; "
          "default: true, and false for the root");
ABSL_FLAG(std::string, param_dtype, "",
          "mixed precision, what modules compute with: bf16, f16 or f32");
ABSL_FLAG(std::string, reduce_dtype, "",
          "what gradients are added up in: bf16, f16 or f32; default: that of the weights");
ABSL_FLAG(std::string, gather_codec, "",
          "what matrices are gathered as: mxfp8, mxint8, fp8 or nf4; default: --param_dtype");
ABSL_FLAG(std::string, reduce_codec, "",
          "what gradients travel as between the ranks that shard: mxint8; default: --reduce_dtype");
ABSL_FLAG(bool, checkpoint_activations, false,
          "keep the blocks' inputs only, and compute the rest again in backward");
ABSL_FLAG(std::string, mesh, "",
          "replicas x ranks that shard, as 2x2, instead of --ranks and --replicas; with --tp: "
          "ranks that shard x --tp, or replicas x ranks that shard x --tp");
ABSL_FLAG(int64_t, tp, 1,
          "tensor parallelism: ranks that compute one model together; a divisor of the ranks");
ABSL_FLAG(bool, sequence_parallel, false,
          "with --tp: cut what lies between attention and mlp along the tokens");
ABSL_FLAG(int64_t, ep, 1,
          "expert parallelism: ranks that have a block's experts together; a divisor of the ranks "
          "that shard");
ABSL_FLAG(int64_t, cp, 1,
          "context parallelism: ranks that share a batch, cut along the tokens; a divisor of the "
          "ranks that shard");
ABSL_FLAG(int64_t, batch, 8, "sequences per rank and backward");
ABSL_FLAG(int64_t, accumulate, 1, "backwards per step, whose gradients add up");
ABSL_FLAG(std::string, optimizer, "adamw", "adamw or sgd");
ABSL_FLAG(double, clip, 0, "largest norm of the gradients; 0: any");

namespace programs {
namespace {

constexpr int64_t kMostRanks = int64_t{1} << 20;

int64_t checked_ranks(int64_t ranks) {
  TORCH_CHECK_VALUE(ranks <= kMostRanks, "--ranks: ", ranks, ", allowed are ", kMostRanks,
                    " or less");
  return ranks;
}

OptimizerKind optimizer_kind(const std::string& name) {
  if (name == "adamw") return OptimizerKind::kAdamW;
  TORCH_CHECK_VALUE(name == "sgd", "--optimizer: ", name, ", allowed are adamw and sgd");
  return OptimizerKind::kSgd;
}

Units units() {
  const std::string name = absl::GetFlag(FLAGS_units);
  if (name == "blocks") return Units::kBlocks;
  if (name == "layers") return Units::kLayers;
  TORCH_CHECK_VALUE(name == "root", "--units: ", name, ", allowed are blocks, layers and root");
  return Units::kRoot;
}

// "2x2x2"; empty for any other text.
std::vector<int64_t> sizes_of(const std::string& mesh) {
  std::vector<int64_t> sizes;
  std::istringstream parts(mesh);
  for (std::string part; std::getline(parts, part, 'x');) {
    int64_t size = 0;
    if (!absl::SimpleAtoi(part, &size) || size <= 0 || size > kMostRanks) return {};
    sizes.push_back(size);
  }
  return sizes;
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

using Codec = std::shared_ptr<const fsdp::GatherCodec>;

Codec gather_codec() {
  const std::string name = absl::GetFlag(FLAGS_gather_codec);
  if (name.empty()) return nullptr;
  if (name == "mxfp8") return fsdp::mxfp8();
  if (name == "mxint8") return fsdp::mxint8();
  if (name == "fp8") return fsdp::fp8_rows();
  TORCH_CHECK_VALUE(name == "nf4", "--gather_codec: ", name,
                    ", allowed are mxfp8, mxint8, fp8 and nf4");
  return fsdp::nf4();
}

Codec reduce_codec() {
  const std::string name = absl::GetFlag(FLAGS_reduce_codec);
  TORCH_CHECK_VALUE(name.empty() || name == "mxint8", "--reduce_codec: ", name,
                    ", allowed is mxint8");
  return name.empty() ? nullptr : fsdp::mxint8();
}

fsdp::FullyShardOptions sharding_options() {
  fsdp::FullyShardOptions options{.reshard_after_forward = reshard_after_forward(),
                                  .mp_policy = {.param_dtype = dtype(FLAGS_param_dtype),
                                                .reduce_dtype = dtype(FLAGS_reduce_dtype)}};
  if (const auto codec = gather_codec()) {
    options.gather_codec_fn = [codec](const std::string&, const at::Tensor& weight) {
      return weight.dim() == 2 ? codec : nullptr;
    };
  }
  options.gradient_codecs.shards = reduce_codec();
  if (absl::GetFlag(FLAGS_shard_optimizer)) options.outer = fsdp::Outer::kShardOptimizer;
  return options;
}

}  // namespace

JobShape job_shape() {
  const std::string mesh = absl::GetFlag(FLAGS_mesh);
  const int64_t tp = at_least(1, FLAGS_tp);
  TORCH_CHECK_VALUE(tp > 1 || !absl::GetFlag(FLAGS_sequence_parallel),
                    "--sequence_parallel needs --tp of 2 or more");
  if (mesh.empty()) return {checked_ranks(at_least(1, FLAGS_ranks)), at_least(1, FLAGS_replicas)};
  const auto sizes = sizes_of(mesh);
  const bool valid = sizes.size() == 2 || (sizes.size() == 3 && tp > 1);
  TORCH_CHECK_VALUE(valid, "--mesh: ", mesh, ", allowed are two numbers, as 2x2",
                    tp > 1 ? ", or three, as 2x2x2" : "");
  TORCH_CHECK_VALUE(tp == 1 || sizes.back() == tp, "--mesh: ", mesh,
                    ", whose last number must be --tp, ", tp);
  TORCH_CHECK_VALUE(absl::GetFlag(FLAGS_replicas) == 1,
                    "--mesh and --replicas exclude each other: the first number is the replicas");
  int64_t ranks = 1;
  for (const int64_t size : sizes) ranks = checked_ranks(ranks * size);
  TORCH_CHECK_VALUE(!is_given(FLAGS_ranks) || absl::GetFlag(FLAGS_ranks) == ranks,
                    "--ranks: ", absl::GetFlag(FLAGS_ranks), ", and --mesh, ", mesh, ", has ",
                    ranks);
  return {ranks, sizes.size() == 2 && tp > 1 ? 1 : sizes.front()};
}

void set_job_options(TrainingOptions& options) {
  options.replicas = job_shape().replicas;
  options.tp = at_least(1, FLAGS_tp);
  options.sequence_parallel = absl::GetFlag(FLAGS_sequence_parallel);
  options.ep = at_least(1, FLAGS_ep);
  options.cp = at_least(1, FLAGS_cp);
  options.units = units();
  options.sharding = sharding_options();
  options.checkpoint_activations = absl::GetFlag(FLAGS_checkpoint_activations);
  options.batch = at_least(1, FLAGS_batch);
  options.accumulate = at_least(1, FLAGS_accumulate);
  options.optimizer = optimizer_kind(absl::GetFlag(FLAGS_optimizer));
  options.clip = finite(FLAGS_clip);
}

}  // namespace programs
