#include "dtensor/interpose.h"

#include <mutex>

namespace fsdp::internal {

void install_interposition() {
  static std::once_flag once;
  std::call_once(once, [] {
    install_dtensor_kernels();
    install_gate_kernels();
    install_set_data_kernels();
  });
}

}  // namespace fsdp::internal
