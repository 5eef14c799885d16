// Full parameters on request: for a scope, as FSDP1's summon_full_params, or visited with
// bounded memory, to export weights or to initialise them.
//
//   {
//     fsdp::SummonFullParams full(model);                    // collective
//     // module->parameters() are full tensors here; one rank writes the file
//     if (fsdp::is_rank_zero()) torch::save(model, "model.pt");
//   }                                                        // sharded again; changes persist
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"
#include "fully_shard/fsdp_module.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace fsdp {

struct SummonOptions {
  bool recurse =
      true;  // all units at and below the module; false: the module's own unit, if it is one
  bool writeback = true;  // this rank's part of every change persists; false: changes are dropped
  // Full on the first rank of a unit's mesh (of two dimensions too, where other replicas
  // have the same shards), sharded elsewhere; needs writeback = false.
  bool rank0_only = false;
  bool offload_to_cpu = false;  // copies on the CPU, one unit's memory at a time on the device
  bool with_grads = false;      // the parameters' .grad are full as well
};

// While it lives, the module's registry (parameters(), named_parameters()) holds full
// tensors: the members, readable by pointer, or copies with offload_to_cpu and where
// members are not what the shards are (mp_policy.param_dtype, gather_codec_fn; forwards
// do not see what is written to those before the end). For looking, saving, editing and
// forwards; a backward of these units is an error, since its gradients belong to what the
// registry holds otherwise. LibTorch's torch::save writes the model's whole values there,
// on one rank: all ranks would write one file. An optimizer's states stay sharded, and
// fsdp::save has them.
//
// The constructor is collective over the meshes of the units, and leaves everything as it
// was when it throws: ValueError inside a backward, where a unit is summoned already
// (they do not nest, on any rank and with any options, apply_unsharded included), or
// with_grads while gradients wait for synchronisation or some ranks alone have them (on
// all ranks alike; the meshes of the units compare); NotImplementedError for rank0_only
// with writeback and for offload_to_cpu with with_grads, as in FSDP1. The destructor is
// local. With writeback it counts as a write to every parameter: graphs recorded before
// can not run backward after it.
class [[nodiscard]] FSDP_API SummonFullParams {
 public:
  [[nodiscard]] explicit SummonFullParams(ModuleRef module, SummonOptions options = {});
  [[nodiscard]] explicit SummonFullParams(const FSDPModule& unit, SummonOptions options = {});
  ~SummonFullParams();
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

 private:
  class Scope;
  std::unique_ptr<Scope> scope_;
};

// Calls visit(name, value) for every parameter at and below `module`, in the order of
// named_parameters(): the full value of a sharded one, or the parameter itself. `value`
// is good during the call; clone it to keep it. At most two units are unsharded at a
// time. Tied parameters are visited under each name. Collective over the units' meshes:
// every rank visits all, so let other ranks do nothing in `visit` instead of not calling.
// What `visit` throws ends the visit.
FSDP_API void for_each_full_param(
    ConstModuleRef module,
    const std::function<void(const std::string& name, const at::Tensor& value)>& visit);

// Calls `function` on `module` and on every module below it, in the order of
// Module::apply (parents first), so that an initialiser started from the same seed gives
// the weights of the unsharded model. Meanwhile the parameters of that module's unit, and
// of units around it that were entered before, are full; this rank's part of what
// `function` wrote is kept. Collective over the units' meshes. Throws ValueError, before
// `function` is called, where a unit is summoned (SummonFullParams); and where one is
// held unsharded. What `function` throws ends the visit.
FSDP_API void apply_unsharded(ModuleRef module,
                              const std::function<void(torch::nn::Module&)>& function);

}  // namespace fsdp
