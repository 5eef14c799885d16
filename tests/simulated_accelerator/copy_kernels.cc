#include "tests/simulated_accelerator/allocator.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/host_view.h"
#include "tests/simulated_accelerator/kernels.h"
#include "tests/simulated_accelerator/machine.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

void check_copy(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_on_device(from) || !is_on_device(to) || from.device() == to.device(),
      "simulated accelerator: copies between devices, here from ", from.device(), " to ",
      to.device());
}

at::Tensor on_host(const at::Tensor& tensor) {
  return is_on_device(tensor) ? host_view(tensor) : tensor;
}

// As for CUDA, a copy that may run later needs pinned memory on the host's side; what it
// reads from other memory is read when it is issued.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  check_copy(self, target);
  if (target.numel() == 0) return target;
  const bool reads_device = is_on_device(self), writes_device = is_on_device(target);
  const auto device = writes_device ? target.device() : self.device();
  const c10::DeviceGuard guard(device);
  const bool runs_later =
      non_blocking && is_pinned((reads_device ? target : self).storage().data());
  Accesses accesses;
  if (reads_device) add(accesses, reads(self));
  if (writes_device) add(accesses, writes(target));
  const auto from = reads_device || runs_later ? on_host(self) : copy_of_host_value(self);
  const auto copy = [from, to = on_host(target)] {
    const PlainKernels plain;
    to.copy_(from);
  };
  const auto queue = current_queue(device.index());
  auto& machine = Machine::instance();
  machine.launch(queue, {"copy", std::move(accesses), copy});
  if (!reads_device && !non_blocking) machine.host_waits_for_stream(queue, "copy from CPU");
  if (!writes_device && !runs_later) machine.host_waits_for_stream(queue, "copy to CPU");
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, /*non_blocking=*/false);
}

at::Scalar read_number(const at::Tensor& self) {
  const auto queue = current_queue(self.device().index());
  auto number = std::make_shared<at::Scalar>();
  Machine::instance().launch(queue, {"item", reads(self), [number, view = host_view(self)] {
                                       const PlainKernels plain;
                                       *number = view.item();
                                     }});
  Machine::instance().host_waits_for_stream(queue, "item");
  return *number;
}

}  // namespace

void register_copy_kernels(torch::Library& library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_number);
}

}  // namespace fsdp::testing::simulated
