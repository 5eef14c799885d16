#include "programs/trainer/setup/sharded_model.h"

#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/auto_shard.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/hugging_face/hugging_face.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/parallelize_module.h"

#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

namespace programs {
namespace {

// Computed when the model is sharded.
Transformer make_deferred_model(const TrainingOptions& options) {
  torch::manual_seed(options.seed);
  return fsdp::deferred_init([&] {
    Transformer model(options.model);
    add_adapters(*model, options.lora);
    return model;
  });
}

void shard_blocks(Transformer& model, const fsdp::DeviceMesh& mesh,
                  const fsdp::FullyShardOptions& options) {
  if (model->head) fsdp::fully_shard(model->embedding, mesh, options);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh, options);
  if (model->head) fsdp::fully_shard(model->head, mesh, options);
  fsdp::fully_shard(model, mesh, options);
}

// The mesh of the ranks along these dimensions, which exist if their options say so, and
// of the replicas.
fsdp::DeviceMesh with_replicas(const TrainingOptions& options, const fsdp::DeviceMesh& mesh,
                               const std::vector<std::string>& dims) {
  const auto joined = dims.size() > 1 ? mesh.flatten(dims) : mesh;
  const auto name = c10::Join("_", dims);
  return options.replicas > 1 ? joined[std::vector<std::string>{"replicate", name}] : joined[name];
}

// Those that tokens go to.
fsdp::DeviceMesh mesh_of_experts(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  if (options.tp == 1) return mesh["ep"];
  return options.ep == 1 ? mesh["tp"] : mesh.flatten({"ep", "tp"})["ep_tp"];
}

// Those that have the same experts.
fsdp::DeviceMesh mesh_of_copies(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  std::vector<std::string> dims = {"dp"};
  if (options.cp > 1) dims.emplace_back("cp");
  return with_replicas(options, mesh, dims);
}

bool cuts_experts(const TrainingOptions& options) {
  return options.model.mixture.experts > 0 && (options.ep > 1 || options.tp > 1);
}

// Experts are units of their own, over the ranks that have the same ones.
void shard_experts(Transformer& model, const fsdp::DeviceMesh& mesh,
                   const TrainingOptions& options) {
  const auto of_experts = mesh_of_experts(options, mesh);
  fsdp::parallelize_module(model, of_experts, {{"block*.mlp.experts", fsdp::ExpertParallel{}}});
  for (auto& block : model->blocks) {
    block->mixture->mesh = of_experts;
    fsdp::fully_shard(block->mixture->experts, mesh_of_copies(options, mesh), options.sharding);
  }
}

void shard(Transformer& model, const fsdp::DeviceMesh& mesh, const TrainingOptions& options) {
  const auto has_parameters = [](torch::nn::Module& module) {
    return !module.parameters(/*recurse=*/false).empty();
  };
  switch (options.units) {
    case Units::kBlocks:
      return shard_blocks(model, mesh, options.sharding);
    case Units::kLayers:
      fsdp::auto_shard(model, fsdp::by_fn(has_parameters), mesh, options.sharding);
      return;
    case Units::kRoot:
      fsdp::fully_shard(model, mesh, options.sharding);
  }
}

void parallelize(Transformer& model, const fsdp::DeviceMesh& tp, const TrainingOptions& options) {
  const auto head_width = checked(options.model).head_width;
  auto plan = transformer_plan(head_width, options.sequence_parallel);
  if (options.model.mixture.experts > 0)
    std::erase_if(plan, [](const auto& entry) { return entry.first.starts_with("block*.mlp."); });
  if (options.model.qk_norm)
    plan.emplace_back("block*.attention.*_norm", fsdp::ReplicateParallel{});
  if (options.lora.rank > 0) {
    const auto more = adapter_plan(options.lora.targets, head_width, options.sequence_parallel);
    plan.insert(plan.end(), more.begin(), more.end());
  }
  if (!model->head) std::erase_if(plan, [](const auto& entry) { return entry.first == "head"; });
  fsdp::parallelize_module(model, tp, plan);
}

void checkpoint_blocks(Transformer& model) {
  model->around_block = [](const auto& run, const torch::Tensor& input) {
    return fsdp::checkpoint(run, input);
  };
}

double parameter_bytes(const torch::nn::Module& model) {
  double bytes = 0;
  for (const auto& parameter : model.parameters()) bytes += static_cast<double>(parameter.nbytes());
  return bytes;
}

// QLoRA: the matrices of the frozen model in 4 bits.
TrainingOptions with_codes_of_base(TrainingOptions options) {
  if (!options.lora.stores_nf4) return options;
  auto& codec_fn = options.sharding.gather_codec_fn;
  codec_fn = [of_adapters = codec_fn](const std::string& name, const at::Tensor& weight) {
    if (!weight.requires_grad()) return weight.dim() == 2 ? fsdp::nf4() : nullptr;
    return of_adapters ? of_adapters(name, weight) : nullptr;
  };
  return options;
}

}  // namespace

void check_mesh(const TrainingOptions& options, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks % options.tp == 0, "--tp: ", options.tp,
                    ", allowed are divisors of the number of ranks, ", ranks);
  const int64_t data_ranks = ranks / options.tp;
  TORCH_CHECK_VALUE(data_ranks % options.replicas == 0, "--replicas: ", options.replicas,
                    ", allowed are divisors of the number of ranks",
                    options.tp > 1 ? " by --tp, " : ", ", data_ranks);
  const int64_t experts = options.model.mixture.experts;
  TORCH_CHECK_VALUE(data_ranks / options.replicas % options.ep == 0, "--ep: ", options.ep,
                    ", allowed are divisors of the ranks that shard, ",
                    data_ranks / options.replicas);
  TORCH_CHECK_VALUE(options.ep == 1 || experts > 0, "--ep needs a model with experts (--experts)");
  TORCH_CHECK_VALUE(options.tp == 1 || experts == 0 || options.sequence_parallel,
                    "--tp of a model with experts needs --sequence_parallel: each rank routes its "
                    "own of the tokens");
  TORCH_CHECK_VALUE(options.tp == 1 || options.cp == 1 || experts == 0,
                    "--cp and --tp of a model with experts exclude each other");
  TORCH_CHECK_VALUE(data_ranks / options.replicas / options.ep % options.cp == 0,
                    "--cp: ", options.cp, ", allowed are divisors of the ranks that shard",
                    options.ep > 1 ? " by --ep, " : ", ",
                    data_ranks / options.replicas / options.ep);
  TORCH_CHECK_VALUE(!cuts_experts(options) || options.units != Units::kLayers,
                    "--ep and --units=layers exclude each other");
  TORCH_CHECK_VALUE(options.sharding.outer == fsdp::Outer::kReplicate || options.replicas > 1,
                    "--shard_optimizer needs 2 or more replicas (--replicas, --mesh)");
}

MeshDims mesh_dims(const TrainingOptions& options, int64_t ranks) {
  check_mesh(options, ranks);
  MeshDims dims;
  const auto add = [&](int64_t size, const char* name) {
    dims.shape.push_back(size);
    dims.names.emplace_back(name);
  };
  if (options.replicas > 1) add(options.replicas, "replicate");
  add(ranks / options.replicas / options.tp / options.ep / options.cp, "dp");
  if (options.ep > 1) add(options.ep, "ep");
  if (options.cp > 1) add(options.cp, "cp");
  if (options.tp > 1) add(options.tp, "tp");
  return dims;
}

fsdp::DeviceMesh mesh_of(const TrainingOptions& options, int64_t ranks) {
  const auto dims = mesh_dims(options, ranks);
  return fsdp::init_device_mesh(options.device, dims.shape, dims.names);
}

fsdp::DeviceMesh data_mesh_of(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  std::vector<std::string> dims = {"dp"};
  if (options.ep > 1) dims.emplace_back("ep");
  if (options.cp > 1) dims.emplace_back("cp");
  return with_replicas(options, mesh, dims);
}

std::vector<fsdp::DeviceMesh> meshes_of_units(const TrainingOptions& options,
                                              const fsdp::DeviceMesh& mesh) {
  std::vector<fsdp::DeviceMesh> meshes = {data_mesh_of(options, mesh)};
  if (cuts_experts(options)) meshes.push_back(mesh_of_copies(options, mesh));
  return meshes;
}

Transformer make_model(const TrainingOptions& options) {
  torch::manual_seed(options.seed);
  Transformer model(options.model);
  add_adapters(*model, options.lora);
  model->to(options.device);
  if (!options.init_from.empty()) load_hugging_face(model, options.model, options.init_from);
  return model;
}

ShardedModel shard_model(Transformer model, const TrainingOptions& options,
                         const fsdp::DeviceMesh& mesh) {
  const double bytes = parameter_bytes(*model);
  if (options.tp > 1) parallelize(model, mesh["tp"], options);
  if (cuts_experts(options)) shard_experts(model, mesh, options);
  shard(model, data_mesh_of(options, mesh), options);
  fsdp::materialize(*model);
  if (options.checkpoint_activations) checkpoint_blocks(model);
  return {std::move(model), bytes};
}

ShardedModel make_sharded_model(const TrainingOptions& given, const fsdp::DeviceMesh& mesh) {
  const auto options = with_codes_of_base(given);
  const bool is_deferred = options.deferred_init || !options.init_from.empty();
  auto sharded =
      shard_model(is_deferred ? make_deferred_model(options) : make_model(options), options, mesh);
  if (!options.init_from.empty())
    load_hugging_face(sharded.model, options.model, options.init_from);
  if (options.lora.stores_nf4) fsdp::store_codes(sharded.model);
  return sharded;
}

}  // namespace programs
