#include "fully_shard/transport/peer_waits.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/peer_memory/peer_memory.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::internal {

void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what) {
  Pending coming(collectives.group(), std::move(work));
  collectives.log()->await_apart(std::move(coming.with_peer(rank)), what);
}

bool Patience::await(const PeerChannel& channel, c10::function_ref<bool()> is_over) {
  if (is_over()) {
    was_in_vain = false;
    return true;
  }
  if (was_in_vain) return false;
  auto& memory = channel.memory();
  const auto until = std::chrono::steady_clock::now() + most;
  for (int64_t round = 0; !is_over(); ++round) {
    const bool is_vain = memory.sleeps_in(round) && channel.has_gone_ranks();
    if (is_vain || std::chrono::steady_clock::now() >= until) {
      was_in_vain = true;
      return is_over();
    }
    memory.wait_round(round, is_over);
  }
  return true;
}

void end_collectives(const Collectives& collectives, const std::string& why) {
  collectives.log()->watch([&] { C10_THROW_ERROR(DistBackendError, why); });
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace fsdp::internal
