// Where a unit's tensors are: fully_shard takes a module on the CPU to its mesh's device,
// unit by unit. Parameters move one at a time, as each becomes a shard
// (params/group_builder.h), then buffers. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/units/module_tree.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// Where `tensor` is to be: what is on the CPU goes to the mesh's device, all else stays.
c10::Device device_in_unit(const at::Tensor& tensor, const DeviceMesh& mesh);
// Where the unit's modules compute: where its parameters are to be.
c10::Device device_of_unit(const ManagedModules& managed, const DeviceMesh& mesh);
// Of those on the CPU, in place: members, registry and handles taken before see it. On a
// CPU nothing is touched.
void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device);

}  // namespace fsdp::internal
