#include "fully_shard/params/shard_home.h"

#include <ATen/ops/zeros.h>

#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<bool> offloads_from_cpu = false;

}  // namespace

ShardHome home_of_shards(const OffloadPolicy& policy, c10::DeviceType members) {
  if (!policy.offload_to_cpu) return ShardHome::kWithMembers;
  if (members == c10::kCPU) return offloads_from_cpu ? ShardHome::kHost : ShardHome::kWithMembers;
  return policy.pin_memory ? ShardHome::kPinnedHost : ShardHome::kHost;
}

void set_offloads_from_cpu(bool on) { offloads_from_cpu = on; }

at::Tensor memory_at(ShardHome home, int64_t bytes, c10::Device device, Transport& transport) {
  if (home == ShardHome::kWithMembers || device.is_meta())
    return transport.shard_memory(bytes, device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
  return at::zeros({bytes}, options.pinned_memory(home == ShardHome::kPinnedHost));
}

}  // namespace fsdp::internal
