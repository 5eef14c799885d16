// A process group as the collectives see it, without c10d's heavy headers.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace at {
class Tensor;
}

namespace fsdp::internal {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

int64_t group_rank(const Group& group);
int64_t group_size(const Group& group);
std::string group_backend(const Group& group);  // "gloo", "nccl", "fake", ...
// Whether one of its backends takes tensors of such a device.
bool serves(const Group& group, c10::DeviceType device_type);
// Whether CPU tensors travel through Gloo: in groups of a device's backend too.
bool has_gloo(const Group& group);
// Whether `tensor` does.
bool through_gloo(const Group& group, const at::Tensor& tensor);

}  // namespace fsdp::internal
