// What a checkpoint loader or a binding may hand over: parameters without a recording.
#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

inline void put_on_meta(torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    const auto shape = torch::empty(parameter.sizes(), parameter.options().device(torch::kMeta));
    parameter.unsafeGetTensorImpl()->shallow_copy_from(shape.getIntrusivePtr());
  }
}

}  // namespace fsdp::testing
