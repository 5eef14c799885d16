// Visiting full parameters with bounded memory: exporting weights, initialising them.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace fsdp {

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
