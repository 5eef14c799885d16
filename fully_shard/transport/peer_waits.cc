#include "fully_shard/transport/peer_waits.h"

#include "device_mesh/collectives/issue_log.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::internal {

void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what) {
  Pending coming(collectives.group(), std::move(work));
  collectives.log()->await_apart(std::move(coming.with_peer(rank)), what);
}

void end_collectives(const Collectives& collectives, const std::string& why) {
  collectives.log()->watch([&] { C10_THROW_ERROR(DistBackendError, why); });
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace fsdp::internal
