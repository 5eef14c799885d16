// The runtime's own tensors are ordinary ones, whatever mode the user's code runs in.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::internal {

struct RuntimeMode {
  c10::InferenceMode no_inference{false};
  c10::NoGradGuard no_grad;
};

}  // namespace fsdp::internal
