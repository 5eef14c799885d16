#include "checkpoint/optimizer/archive_fields.h"
#include "checkpoint/optimizer_state_dict.h"
#include "dtensor/dtensor.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

namespace fsdp {
namespace {

namespace files = internal::checkpoint;

// This rank's part of what is whole, as a step makes state; other state as it is.
at::Tensor part_of_state(const at::Tensor& state, const at::Tensor& parameter) {
  const bool is_whole = state.defined() && !is_dtensor(state) && state.sizes() == parameter.sizes();
  if (!is_whole) return state;
  at::Tensor part = at::empty_like(parameter.detach(), at::TensorOptions(state.scalar_type()));
  return part.copy_(state);
}

files::Fields parts_of_state(files::Fields fields, const at::Tensor& parameter) {
  for (auto& [name, value] : fields) {
    if (value.isTensor()) {
      value = part_of_state(value.toTensor(), parameter);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> parts;
      for (const at::Tensor& each : value.toTensorVector())
        parts.push_back(part_of_state(each, parameter));
      value = parts;
    }
  }
  return fields;
}

}  // namespace

void shard_full_optimizer_state(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  files::OptimizerFields fields;
  for (const auto& group : optimizer.param_groups()) {
    fields.options.push_back(files::fields_of(group.options()));
    for (const auto& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (!is_dtensor(parameter) || state == optimizer.state().end()) continue;
      fields.state[parameter.unsafeGetTensorImpl()] =
          parts_of_state(files::fields_of(*state->second), parameter);
    }
  }
  files::set_fields(optimizer, fields);
}

}  // namespace fsdp
