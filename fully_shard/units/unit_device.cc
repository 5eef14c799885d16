#include "fully_shard/units/unit_device.h"

#include "dtensor/dtensor.h"

#include <c10/core/GradMode.h>

namespace fsdp::internal {

c10::Device device_in_unit(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const bool stays = !tensor.is_cpu() || mesh.device_type() == c10::kCPU;
  return stays ? tensor.device() : local_device(mesh);
}

c10::Device device_of_unit(const ManagedModules& managed, const DeviceMesh& mesh) {
  for (const auto& param : managed.params) {
    if (!param.tensor.is_meta()) return device_in_unit(param.tensor, mesh);
  }
  return local_device(mesh);
}

void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device) {
  if (device.is_cpu()) return;
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers) {
    if (!buffer.is_cpu() || is_dtensor(buffer)) continue;
    // As parameters are moved: set_data() knows the way from the CPU to CUDA only.
    const auto moved = buffer.detach().to(device);
    buffer.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

}  // namespace fsdp::internal
