#include "on_demand/gate_key.h"

#include "on_demand/gate.h"
#include "on_demand/set_data_gate.h"

#include <mutex>

namespace fsdp::internal {

void install_gate() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_gate_kernels();
    register_set_data_kernels();
  });
}

}  // namespace fsdp::internal
