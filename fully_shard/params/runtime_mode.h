// The runtime's own tensors are ordinary ones, whatever mode the user's code runs in.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace fsdp::internal {

class RuntimeMode {
 public:
  RuntimeMode() {
    if (!is_ordinary()) ordinary_.emplace(false);
  }

 private:
  // Switching takes as long as a few views, and most often there is nothing to switch.
  static bool is_ordinary() {
    return !c10::InferenceMode::is_enabled() &&
           !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
  }

  std::optional<c10::InferenceMode> ordinary_;
  c10::NoGradGuard no_grad_;
};

}  // namespace fsdp::internal
