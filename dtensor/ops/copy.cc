// A copy lies as the original does. Terms are copied as they are, but where the copy has
// another dtype, which rounds: rounding before a reduction is not rounding after it. A
// plain tensor of the global shape stands for the whole value: each rank takes its part,
// which is how a file saved without sharding loads into DTensors.
#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dtensor.h"
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

enum MemoryFormat : int64_t { kContiguous, kPreserve, kChannelsLast };  // as at::MemoryFormat

// With the second dimension last in memory.
ResultGeometry channels_last(const std::vector<int64_t>& shape) {
  std::vector<int64_t> stride = contiguous_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d) stride[d] *= d == 1 ? 1 : 2;
  stride[1] = 1;
  return laid_as(shape, stride);
}

// None means as operand 0 lies, without gaps.
ResultGeometry copied(const OpSchema& call, size_t memory_format) {
  const Operand& self = call.operands[0];
  const auto* const given = std::get_if<int64_t>(&call.plain[memory_format]);
  if (given == nullptr || *given == kPreserve) return laid_as(self.shape, self.stride);
  return *given == kContiguous ? contiguous(self.shape) : channels_last(self.shape);
}

// clone(self, memory_format)
std::vector<PlacementStrategy> clone_strategy(const OpSchema& call) {
  return pointwise_strategy(call, Linearity::kAny);
}
std::vector<ResultGeometry> clone_results(const OpSchema& call) { return {copied(call, 1)}; }

// _to_copy(self, dtype, layout, device, pin_memory, non_blocking, memory_format)
std::vector<PlacementStrategy> to_copy_strategy(const OpSchema& call) {
  const Dtype* const dtype = call.dtype(1);
  const bool rounds = dtype != nullptr && *dtype != call.operands[0].dtype;
  return pointwise_strategy(call, rounds ? Linearity::kNone : Linearity::kAny);
}
std::vector<ResultGeometry> to_copy_results(const OpSchema& call) { return {copied(call, 6)}; }

// What this rank has of `source`, placed as `self`. A plain number stays one.
at::Tensor part_for_copy(const at::Tensor& self, const at::Tensor& source,
                         const OperatorCall& call) {
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

void copy_into(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  const at::Tensor source = call.argument(1).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(is_dtensor(self), call.description(),
                              ": a plain tensor cannot take a DTensor's value. "
                              "Copy from .full_tensor() (collective) or .to_local().");
  call.argument(1) = part_for_copy(self, source, call);
  call.argument(0) = local_of(self);
  call.run();
  call.finish(self);
}

// A DTensor's memory belongs to its mesh: what would replace it is copied into it.
void set_by_copy(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  const at::Tensor source = call.argument(1).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(is_dtensor(self), call.description(),
                              ": a plain tensor cannot share a DTensor's memory. "
                              "Use .full_tensor() (collective) or .to_local().");
  TORCH_CHECK_VALUE(source.sizes() == self.sizes(), call.description(),
                    ": the source must have the global shape ", self.sizes(), ", got ",
                    source.sizes(), " (rank ", spec_of(self).mesh().rank(), ")");
  local_of(self).copy_(part_for_copy(self, source, call));
  call.finish(self);
}

}  // namespace

void add_copy(OpTable& table) {
  table.add("clone.", {.strategy = {.strategies = clone_strategy, .results = clone_results}});
  table.add("_to_copy.",
            {.strategy = {.strategies = to_copy_strategy, .results = to_copy_results}});
  table.add("copy_", {.handler = copy_into, .overwrites = true});
  table.add("set_.source_Tensor", {.handler = set_by_copy, .overwrites = true});
}

}  // namespace fsdp::internal
