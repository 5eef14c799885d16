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

// A bounded wait for ranks that are probably about to come; a correct program may also
// have them wait for this rank elsewhere. After one wait that ended in vain, later ones
// return at once, until ranks have come before anybody waited for them. A wait also ends
// when a rank of the channel is gone: whatever needs that rank reports it.
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
