// Copies: to(dtype), copy_ and set_. A plain tensor of the global shape stands for
// the whole value: each rank takes its part, which is how a file saved without sharding
// loads into DTensors.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/compare_plain.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/copy_ways.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

void to_copy_rule(OperatorCall& call) {
  static const WaysKernel exact(copying(/*rounds=*/false, /*memory_format=*/6), call.handle());
  static const WaysKernel rounding(copying(/*rounds=*/true, /*memory_format=*/6), call.handle());
  const at::Tensor& self = call.argument(0).toTensor();
  const c10::IValue& dtype = call.argument(1);
  const c10::IValue& device = call.argument(3);
  TORCH_CHECK_NOT_IMPLEMENTED(device.isNone() || device.toDevice().type() == self.device().type(),
                              call.description(), ": a DTensor stays on its mesh's device type, ",
                              self.device().type(), ", got ", device.toDevice(),
                              ". Move .to_local() or .full_tensor() instead.");
  const bool is_exact = dtype.isNone() || dtype.toScalarType() == self.scalar_type();
  (is_exact ? exact : rounding).run(call);
}

// What this rank has of `source`, placed as `self`. A plain number stays one.
at::Tensor part_for(const at::Tensor& self, const at::Tensor& source, const OperatorCall& call) {
  const DTensorSpec& spec = spec_of(self);
  const bool same_shape = source.sizes() == self.sizes();
  const bool fits = same_shape || at::is_expandable_to(source.sizes(), self.sizes());
  if (is_dtensor(source)) {
    TORCH_CHECK_VALUE(spec_of(source).mesh() == spec.mesh(), call.description(),
                      ": the meshes differ; copy from ", ".full_tensor() instead (rank ",
                      spec.mesh().rank(), ")");
    TORCH_CHECK_VALUE(fits, call.description(), ": the shapes differ (rank ", spec.mesh().rank(),
                      ")");
    const at::Tensor whole = same_shape ? source : source.expand(self.sizes());
    return moved_part(whole, spec.placements());
  }
  if (owner_of(self) == nullptr) compare_plain(call.handle().schema().name(), source, spec.mesh());
  TORCH_CHECK_VALUE(fits, call.description(), ": a plain source must have the global shape ",
                    self.sizes(), ", got ", source.sizes(),
                    "; write this rank's part through .to_local() (rank ", spec.mesh().rank(), ")");
  if (source.numel() == 1 && !spec.has_partial()) return source;
  return placed_whole(source.expand(self.sizes()), spec);
}

void copy_into_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const at::Tensor source = call.argument(1).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(is_dtensor(self), call.description(),
                              ": a plain tensor cannot take a DTensor's value. "
                              "Copy from .full_tensor() (collective) or .to_local().");
  call.argument(1) = part_for(self, source, call);
  call.argument(0) = local_of(self);
  call.run();
  call.finish(self);
}

// A DTensor's memory belongs to its mesh: what would replace it is copied into it.
void set_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const at::Tensor source = call.argument(1).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(is_dtensor(self), call.description(),
                              ": a plain tensor cannot share a DTensor's memory. "
                              "Use .full_tensor() (collective) or .to_local().");
  TORCH_CHECK_VALUE(source.sizes() == self.sizes(), call.description(),
                    ": the source must have the global shape ", self.sizes(), ", got ",
                    source.sizes(), " (rank ", spec_of(self).mesh().rank(), ")");
  local_of(self).copy_(part_for(self, source, call));
  call.finish(self);
}

}  // namespace

void add_copy_rules(RuleTable& table) {
  table["_to_copy"] = to_copy_rule;
  table["copy_"] = copy_into_rule;
  table["set_.source_Tensor"] = set_rule;
}

}  // namespace fsdp::internal
