// Waits for one other rank of a mesh dimension whose ranks share memory, and the end of
// the dimension's collectives where these find that ranks do not belong together. Nothing
// is announced, so ranks may wait in any order.
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace c10d {
class Work;
}

namespace fsdp::internal {

class PeerChannel;

// Until `work`, of PeerChannel, is over, which is up to that rank of the group. Throws as
// IssueLog::await_apart(). what: in errors of all ranks.
void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what);

// A wait that a program may be right to make vain: other ranks may be waiting for this
// one elsewhere. Ranks in step come soon; once they did not, the next waits are left out,
// until ranks have come before anybody waited. Nor is a rank waited for when one of the
// channel is gone: what needs that one says so.
struct Patience {
  std::chrono::milliseconds most{500};
  bool was_in_vain = false;

  // False: it is not over, and not waited for any more.
  bool await(const PeerChannel& channel, c10::function_ref<bool()> is_over);
};

// Throws DistBackendError, and ends all collectives of the dimension, on the others'
// ranks too.
[[noreturn]] void end_collectives(const Collectives& collectives, const std::string& why);

}  // namespace fsdp::internal
