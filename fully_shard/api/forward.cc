// The casts at a module's boundary. Inputs that meet a parameter are cast without it
// (on_demand/gate_arguments.h).
#include "fully_shard/forward.h"

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/units/unit.h"

#include <ATen/record_function.h>
#include <torch/nn/module.h>

namespace fsdp::internal {

ForwardRange::ForwardRange(const torch::nn::Module& module) {
  const auto unit = at::hasCallbacks() ? find_unit(module) : nullptr;
  if (unit) range_ = std::make_unique<ProfilerRange>("forward", unit->display_name());
}
ForwardRange::~ForwardRange() = default;

BoundaryCasts boundary_casts_of(const torch::nn::Module& module) {
  const auto unit = find_unit(module);
  if (!unit) return {};
  BoundaryCasts casts;
  if (!unit->device.is_cpu()) casts.inputs.device = unit->device;
  if (unit->policy.full_precision) return casts;
  if (unit->precision.cast_forward_inputs) casts.inputs.dtype = unit->precision.param_dtype;
  casts.outputs.dtype = unit->precision.output_dtype;
  return casts;
}

at::Tensor cast_tensor(const at::Tensor& tensor, const CastTo& to) {
  if (!tensor.defined()) return tensor;
  const auto device = to.device.value_or(tensor.device());
  const auto own = tensor.scalar_type();
  const auto dtype = at::isFloatingType(own) ? to.dtype.value_or(own) : own;
  if (device != tensor.device()) return tensor.to(device, dtype);
  return dtype == own ? tensor : tensor.to(dtype);
}

}  // namespace fsdp::internal
