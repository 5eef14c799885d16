#include "fully_shard/params/shard_location.h"

#include <ATen/ops/zeros.h>

#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<bool> offloads_from_cpu = false;

}  // namespace

ShardLocation location_of_shards(const OffloadPolicy& policy, c10::DeviceType members) {
  if (!policy.offload_to_cpu) return ShardLocation::kWithMembers;
  if (members == c10::kCPU)
    return offloads_from_cpu ? ShardLocation::kHost : ShardLocation::kWithMembers;
  return policy.pin_memory ? ShardLocation::kPinnedHost : ShardLocation::kHost;
}

void set_offloads_from_cpu(bool on) { offloads_from_cpu = on; }

at::Tensor memory_at(ShardLocation home, int64_t bytes, c10::Device device, Transport& transport) {
  if (home == ShardLocation::kWithMembers || device.is_meta())
    return transport.shard_memory(bytes, device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
  return at::zeros({bytes}, options.pinned_memory(home == ShardLocation::kPinnedHost));
}

}  // namespace fsdp::internal
