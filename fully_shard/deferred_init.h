// Building a model without allocating it. The constructor's operators run on the meta
// device and are recorded; each parameter is computed when the model is materialised, of
// which this rank keeps its shard.
//
//   auto model = fsdp::deferred_init([&] { return Transformer(config); });
//   for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
//   fsdp::fully_shard(model, mesh);
//   fsdp::materialize(*model);
//
// The values are, bit for bit, those of a model that was built at once from the same
// state of the generator that the thread draws from (the default one, or manual_seed's),
// which is left as such a model leaves it.
// What changes the tensors afterwards (model->apply(init_weights), Module::to(dtype)) is
// recorded too, until they are materialised or given to fully_shard.
//
// Not thread-safe: a model is built, initialised and materialised by one thread.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <utility>

namespace torch::nn {
class Module;
}

namespace fsdp {

namespace internal {
// Operators of this thread are recorded while it lives.
class [[nodiscard]] FSDP_API DeferredInit {
 public:
  [[nodiscard]] DeferredInit();
  DeferredInit(const DeferredInit&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard to_the_gate_;
};
}  // namespace internal

// Returns build(), whose tensors have shapes, but no values and no memory. Peak memory:
// the largest tensor that random numbers are drawn for. Local. Throws ValueError, naming
// the operator, where what `build` does depends on values (item(), nonzero()), where an
// operator has no kernel for the meta device, and for tensors on other devices than the
// CPU; accesses of memory past operators throw too.
template <class Build>
[[nodiscard]] auto deferred_init(Build&& build) {
  const internal::DeferredInit scope;
  return std::forward<Build>(build)();
}

// Gives every parameter and buffer at and below `module` that is on the meta device
// memory and values: to a unit's parameters this rank's shards, on the device of the
// unit's mesh, and the whole tensor to others, on that of the nearest unit's mesh above
// them, or the CPU. Handles and registry entries stay what they were, and so does an
// optimizer over them. Peak memory beyond what stays: what one parameter takes to
// compute.
//
// Deferred tensors get what was recorded. Others of the meta device get zeros, and then
// `initialise` is called for every module that has one of them, in the order of
// Module::apply (parents first), with the parameters of its unit full and gradients off:
// it is to write those that the module itself has, alike on all ranks.
//
// Local, but for `initialise`, which makes it collective over the units' meshes. Throws
// ValueError, with names and nothing changed, where a tensor that was not deferred would
// need an `initialise` that is not there.
FSDP_API void materialize(ModuleRef module,
                          const std::function<void(torch::nn::Module&)>& initialise = {});

}  // namespace fsdp
