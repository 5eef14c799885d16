// Waits for one other rank of a mesh dimension whose ranks share memory, and the end of
// the dimension's collectives where these find that ranks do not belong together. Nothing
// is announced, so ranks may wait in any order.
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>

namespace c10d {
class Work;
}

namespace fsdp::internal {

// Until `work`, of PeerChannel, is over, which is up to that rank of the group. Throws as
// IssueLog::await_apart(). what: in errors of all ranks.
void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what);

// Throws DistBackendError, and ends all collectives of the dimension, on the others'
// ranks too.
[[noreturn]] void end_collectives(const Collectives& collectives, const std::string& why);

}  // namespace fsdp::internal
