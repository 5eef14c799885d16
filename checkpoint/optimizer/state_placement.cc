#include "checkpoint/optimizer/state_placement.h"

#include "dtensor/dtensor.h"

#include <ATen/core/List.h>
#include <torch/optim/optimizer.h>

namespace fsdp::internal::checkpoint {

at::Tensor StatePlacement::distributed_at(const at::Tensor& parameter,
                                          const StatePlace& place) const {
  void* const handle = parameter.unsafeGetTensorImpl();
  const auto state = optimizer_.state().find(handle);
  if (state == optimizer_.state().end()) return {};
  auto known = fields_.find(handle);
  if (known == fields_.end()) known = fields_.emplace(handle, fields_of(*state->second)).first;
  const auto field = known->second.find(place.field);
  if (field == known->second.end()) return {};
  at::Tensor tensor;
  if (field->second.isTensor()) {
    tensor = field->second.toTensor();
  } else if (field->second.isTensorList()) {
    const auto list = field->second.toTensorVector();
    if (place.index >= 0 && static_cast<size_t>(place.index) < list.size())
      tensor = list[static_cast<size_t>(place.index)];
  }
  return tensor.defined() && is_dtensor(tensor) ? tensor : at::Tensor();
}

at::Tensor StatePlacement::like(const at::Tensor& parameter, const StatePlace& place,
                                at::IntArrayRef shape) const {
  const at::Tensor own = distributed_at(parameter, place);
  if (own.defined() && own.sizes() == shape) return own;
  return parameter.sizes() == shape ? parameter : at::Tensor();
}

at::Tensor StatePlacement::like_of_part(const at::Tensor& parameter,
                                        const StatePlace& place) const {
  const at::Tensor own = distributed_at(parameter, place);
  return own.defined() ? own : parameter;
}

}  // namespace fsdp::internal::checkpoint
