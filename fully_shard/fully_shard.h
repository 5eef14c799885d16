// Sharded training of an unmodified torch::nn::Module.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {world_size});
//   for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);   // bottom-up
//   fsdp::fully_shard(model, mesh);
//   torch::optim::AdamW optimizer(model->parameters(), 3e-4);           // after fully_shard
//   loss(model->forward(tokens), targets).backward();
//   optimizer.step();
//
// After the call module->parameters() holds DTensors, this rank's shards, with sharded
// .grad; the module's own members (linear->weight) keep their identity and global shape
// and hold memory only while used. An operator that reads a member of a sharded unit is a
// collective over the mesh: every rank must run the same ones in the same order. Where
// ranks share memory (docs/design/shared_memory.md) and no gradients are recorded, a rank
// can read it alone.
//
// Operators on entries alone (optimizers, averages) stay sharded. Where no gradients are
// recorded, and of frozen parameters, one that reads an entry, or what was computed from
// one, beside a plain tensor takes that as this rank's own: it computes with the whole
// value (collective) and gives a plain result. What it writes in place stays sharded and
// keeps its part of a plain operand, which must be the same on all ranks.
//
// Nothing here is thread-safe; ranks may be threads of one process, each with its own
// modules.
#pragma once

#include "device_mesh/all_reduce.h"
#include "device_mesh/api.h"
#include "device_mesh/debug.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"
#include "device_mesh/process_group.h"
#include "device_mesh/version.h"
#include "dtensor/dtensor.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/annotation.h"
#include "fully_shard/auto_shard.h"
#include "fully_shard/broadcast_states.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/communicate.h"
#include "fully_shard/counters.h"
#include "fully_shard/custom_collectives.h"
#include "fully_shard/deferred_init.h"
#include "fully_shard/describe_units.h"
#include "fully_shard/forward.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/gather_codec.h"
#include "fully_shard/grad.h"
#include "fully_shard/grad_scaler.h"
#include "fully_shard/host_exchange.h"
#include "fully_shard/policies.h"
#include "fully_shard/profile.h"
#include "fully_shard/raw_access.h"
#include "fully_shard/summon_full_params.h"
#include "fully_shard/wrap_policy.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::jit {
struct Module;
}
namespace torch::nn {
class Module;
}

namespace fsdp {

// Makes `module` a unit: all its parameters that no deeper unit manages are sharded over
// the mesh, in place, and travel together. Of a mesh of two dimensions the first
// replicates and the second shards (hybrid sharding): gradients are summed over the
// shards, then over the replicas. Every rank must hold the same values before. What is on
// the CPU moves to the mesh's device (local_device(mesh)): parameters one at a time, then
// buffers, all in place. A parameter is cut along dimension 0 as torch.chunk cuts, or as
// options.shard_placement_fn says. Local, except that the first call on a mesh is
// collective.
//
// Throws ValueError, leaving the module as it was, for: no module, a null one, one that
// no shared_ptr owns, a container without forward (ModuleList, ModuleDict, ParameterList,
// ParameterDict), a second application, a submodule of a sharded unit (top-down), an
// ignored tensor that is no parameter of the module; for a parameter that is a scalar,
// not contiguous, on another device than the CPU and the mesh's or the unit's others, has
// a .grad, belongs to a live graph, or shares memory with another parameter, a buffer or
// any other tensor: slices of one storage that lie beyond `module` cannot be judged, and
// separate_storages(model) parts them first. A parameter that is registered several times
// is tied and stays so. Also ValueError for a dtype of mp_policy that is not Half,
// BFloat16, Float or Double, and for a placement along a dimension that the parameter
// does not have. Throws NotImplementedError for meshes of more than two dimensions.
FSDP_API FSDPModule fully_shard(ModuleRef module, const DeviceMesh& mesh = default_mesh(),
                                FullyShardOptions options = {});
// Several modules as one unit. Its parameters are named "[i].weight", by the position of
// their module, until an enclosing unit gives them paths.
FSDP_API FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules,
                                const DeviceMesh& mesh = default_mesh(),
                                FullyShardOptions options = {});

// Whether fully_shard was applied to `module` itself. Local.
[[nodiscard]] FSDP_API bool is_fsdp_module(ConstModuleRef module);
// Throws ValueError unless is_fsdp_module(module). Local.
[[nodiscard]] FSDP_API FSDPModule get_fsdp_module(ModuleRef module);
// The units at and below `module`, each once, in pre-order of the modules (children as
// registered); root_only: those without an enclosing unit. Local.
[[nodiscard]] FSDP_API std::vector<FSDPModule> fsdp_modules(ModuleRef module,
                                                            bool root_only = false);

// Units whose parameters every rank has whole: data parallelism as torch's replicate()
// and DDP do it, beside units that are sharded.
//
//   fsdp::replicate(model->norm, mesh);   // small: not worth a gather
//   fsdp::fully_shard(model, mesh);
//
// As fully_shard, but that no rank gives a part of the parameters away: nothing is
// gathered, and gradients are summed by one all-reduce per backward. A unit of hybrid
// sharding over a mesh of as many replicas as `mesh` has ranks, one shard each, so all of
// FSDPModule's switches hold. The first call on a mesh is collective over it, later ones
// are local. Throws ValueError for a mesh of more than one dimension, and what
// fully_shard throws.
FSDP_API FSDPModule replicate(const std::vector<torch::nn::Module*>& modules,
                              const DeviceMesh& mesh = default_mesh(),
                              FullyShardOptions options = {});
FSDP_API FSDPModule replicate(ModuleRef module, const DeviceMesh& mesh = default_mesh(),
                              FullyShardOptions options = {});

// A model whose loader gave it slices of one buffer, for the loop that makes units of it
// bottom-up.
//
//   fsdp::separate_storages(model);
//   for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
//   fsdp::fully_shard(model, mesh);
//
// Gives every parameter at and below `module` that has its storage in common with other
// parameters or buffers memory of its own, in place: handles stay, and so do values.
// Buffers stay where they are. fully_shard cannot tell alone whether slices beyond the
// module that it is given overlap that module's; auto_shard sees the whole model and
// needs no call of this. What is sharded already is left alone. Local.
//
// Throws ValueError, with nothing changed, for a null module; for parameters and buffers
// that have elements in common without being one tensor, naming both; and for a parameter
// of such a storage that belongs to a live graph, or that something else than the
// module's parameters and buffers uses as well, such as a view that the model keeps.
FSDP_API void separate_storages(ModuleRef module);

// TorchScript modules as parts of a model, so that their parameters are sharded and
// trained like all others.
//
//   struct Classifier : torch::nn::Module {
//     Classifier() { register_module("backbone", fsdp::adopt(backbone)); }
//     torch::Tensor forward(const torch::Tensor& x) { return backbone.forward({x}).toTensor(); }
//
//     torch::jit::Module backbone = torch::jit::load("backbone.pt");
//   };
//
// A torch::jit::Module that is a plain member of a torch::nn::Module is invisible:
// parameters() does not list what it holds, and where that is trained, the ranks' copies
// drift apart. Adopted, its tensors are in the registry too, which is all that
// fully_shard needs: what TorchScript runs are operators.
//
// A module with the parameters, buffers and submodules of `module` under their names,
// which shares every tensor with it and has no forward of its own. Move and convert the
// TorchScript module before, not after: it then has other tensors. Throws ValueError for
// one without parameters and buffers, as torch::jit::freeze leaves it. Local.
[[nodiscard]] FSDP_API std::shared_ptr<torch::nn::Module> adopt(const torch::jit::Module& module);

}  // namespace fsdp
