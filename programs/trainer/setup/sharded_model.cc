#include "programs/trainer/setup/sharded_model.h"

#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/auto_shard.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/hugging_face/hugging_face.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/parallelize_module.h"

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

}  // namespace

void check_mesh(const TrainingOptions& options, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks % options.tp == 0, "--tp: ", options.tp,
                    ", allowed are divisors of the number of ranks, ", ranks);
  const int64_t data_ranks = ranks / options.tp;
  TORCH_CHECK_VALUE(data_ranks % options.replicas == 0, "--replicas: ", options.replicas,
                    ", allowed are divisors of the number of ranks",
                    options.tp > 1 ? " by --tp, " : ", ", data_ranks);
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
  add(ranks / options.replicas / options.tp, "dp");
  if (options.tp > 1) add(options.tp, "tp");
  return dims;
}

fsdp::DeviceMesh mesh_of(const TrainingOptions& options, int64_t ranks) {
  const auto dims = mesh_dims(options, ranks);
  return fsdp::init_device_mesh(options.device, dims.shape, dims.names);
}

fsdp::DeviceMesh data_mesh_of(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  return options.replicas > 1 ? mesh[{"replicate", "dp"}] : mesh["dp"];
}

Transformer make_model(const TrainingOptions& options) {
  torch::manual_seed(options.seed);
  Transformer model(options.model);
  add_adapters(*model, options.lora);
  model->to(options.device);
  if (!options.init_from.empty()) load_hugging_face(model, options.init_from);
  return model;
}

ShardedModel shard_model(Transformer model, const TrainingOptions& options,
                         const fsdp::DeviceMesh& mesh) {
  const double bytes = parameter_bytes(*model);
  if (options.tp > 1) parallelize(model, mesh["tp"], options);
  shard(model, data_mesh_of(options, mesh), options);
  fsdp::materialize(*model);
  if (options.checkpoint_activations) checkpoint_blocks(model);
  return {std::move(model), bytes};
}

ShardedModel make_sharded_model(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  const bool is_deferred = options.deferred_init || !options.init_from.empty();
  auto sharded =
      shard_model(is_deferred ? make_deferred_model(options) : make_model(options), options, mesh);
  if (!options.init_from.empty()) load_hugging_face(sharded.model, options.init_from);
  return sharded;
}

}  // namespace programs
