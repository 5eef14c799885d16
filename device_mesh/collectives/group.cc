#include "device_mesh/collectives/group.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace fsdp::internal {

using c10d::ProcessGroup;

int64_t group_rank(const Group& group) { return group->getRank(); }
int64_t group_size(const Group& group) { return group->getSize(); }

std::string group_backend(const Group& group) {
  if (group->getBackendType() != ProcessGroup::CUSTOM) return group->getBackendName();
  return group->getDefaultBackend()->getBackendName();
}

bool serves(const Group& group, c10::DeviceType device_type) {
  const auto served = group->getDeviceTypes();
  return std::any_of(served.begin(), served.end(),
                     [&](const c10::Device& device) { return device.type() == device_type; });
}

bool has_gloo(const Group& group) {
  const auto type = group->getBackendType();
  if (type == ProcessGroup::GLOO || type == ProcessGroup::NCCL) return true;
  return serves(group, c10::kCPU) && group->getBackend(c10::kCPU)->getBackendName() == "gloo";
}

bool through_gloo(const Group& group, const at::Tensor& tensor) {
  return tensor.is_cpu() && has_gloo(group);
}

}  // namespace fsdp::internal
