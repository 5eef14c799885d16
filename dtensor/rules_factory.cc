// New tensors made from a DTensor: *_like and new_*. A Partial model gives a Replicate result.
#include "dtensor/dtensor_impl.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

void check_device(OperatorCall& call, const at::Tensor& self) {
  const c10::IValue* device = call.find_argument("device");
  if (device == nullptr || device->isNone()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(device->toDevice().type() == self.device().type(), call.description(),
                              ": a DTensor stays on its mesh's device type, ", self.device().type(), ", got ",
                              device->toDevice());
}

bool asks_for_contiguous(OperatorCall& call) {
  const c10::IValue* format = call.find_argument("memory_format");
  return format != nullptr && !format->isNone() && format->toMemoryFormat() == at::MemoryFormat::Contiguous;
}

// zeros_like, empty_like, full_like, ...: lies as its model.
void like_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  check_device(call, self);
  DTensorSpec spec = *spec_of(self);
  spec.placements = without_partials(spec.placements);
  if (asks_for_contiguous(call)) spec.stride = contiguous_strides(spec.shape);
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), intern_spec(std::move(spec))));
}

// new_zeros(size), new_empty_strided(size, stride), ...: of the model's shape it lies as the model, of another shape it
// is replicated.
void new_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  check_device(call, self);
  DTensorSpec spec = *spec_of(self);
  auto size = call.find_argument("size")->toIntVector();
  const bool same_shape = size == spec.shape;
  c10::IValue* const stride = call.find_argument("stride");
  spec.stride = stride != nullptr ? stride->toIntVector() : contiguous_strides(size);
  spec.shape = std::move(size);
  spec.placements = without_partials(spec.placements);
  if (!same_shape) std::fill(spec.placements.begin(), spec.placements.end(), Replicate{});
  std::vector<int64_t> local_shape;
  for (const Chunk& chunk : local_box(spec)) local_shape.push_back(chunk.length);
  if (stride != nullptr) *stride = local_shape == spec.shape ? spec.stride : contiguous_strides(local_shape);
  *call.find_argument("size") = local_shape;
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), intern_spec(std::move(spec))));
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  for (const char* name : {"empty_like", "zeros_like", "ones_like", "full_like"}) table[name] = like_rule;
  for (const char* name : {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}) {
    table[name] = new_rule;
  }
}

}  // namespace fsdp::internal
