#include "checkpoint/optimizer/forget_state.h"

#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>

#include <memory>
#include <utility>

namespace fsdp::internal::checkpoint {

void forget_state(torch::optim::Optimizer& optimizer, const std::set<const void*>& handles) {
  const bool is_adagrad = dynamic_cast<torch::optim::Adagrad*>(&optimizer) != nullptr;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      void* const handle = parameter.unsafeGetTensorImpl();
      if (handles.count(handle) == 0) continue;
      optimizer.state().erase(handle);
      if (!is_adagrad) continue;
      const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(0);
      state->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
      optimizer.state()[handle] = std::move(state);
    }
  }
}

}  // namespace fsdp::internal::checkpoint
