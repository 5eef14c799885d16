// Within its scope operators are plain kernels, whatever modes the thread is in.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp::internal {

class PlainKernels {
 public:
  PlainKernels()
      : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
              c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                  c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
};

}  // namespace fsdp::internal
