// The runtime's own tensors are ordinary ones, whatever mode the user's code runs in.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

namespace fsdp::internal {

class RuntimeMode {
 private:
  using Guard = std::optional<c10::InferenceMode>;

  // Switching takes as long as a few views, and most often there is nothing to switch.
  static bool is_ordinary() {
    return !c10::InferenceMode::is_enabled() &&
           !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
  }

  // Switches gradients on, so it comes first and goes last.
  Guard ordinary_ = is_ordinary() ? Guard() : Guard(std::in_place, false);
  c10::NoGradGuard no_grad_;
};

}  // namespace fsdp::internal
