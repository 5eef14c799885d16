// The location of a group's shards between gathers, and with them that of their gradients
// and of what an optimizer keeps of them: with the members, or on the host
// (OffloadPolicy). Their copies from host to device are in shard_buffer.h, those of
// gradients from device to host in transport/copies_to_host.h. Local.
#pragma once

#include "fully_shard/policies.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

enum class ShardLocation { kWithMembers, kHost, kPinnedHost };

// Members on a CPU are at home there.
ShardLocation location_of_shards(const OffloadPolicy& policy, c10::DeviceType members);
// Test mode, process-wide: they are not, and their shards go to host memory beside them.
void set_offloads_from_cpu(bool on);

// Zeros: uint8 [bytes]. device: of the members; on the meta device nothing but a shape.
at::Tensor memory_at(ShardLocation home, int64_t bytes, c10::Device device, Transport& transport);

}  // namespace fsdp::internal
