// The thread of a process that looks at the waits of its ranks (WatchedRank::look), and
// its own connections to their stores.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class Store;
}

namespace fsdp::internal {

class WatchedRank;

// From now on, as long as that lives. Thread-safe.
void watch_waits_of(const std::shared_ptr<WatchedRank>& rank);

// Another connection to the same store, or that one where it has no connections.
c10::intrusive_ptr<c10d::Store> connection_to(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace fsdp::internal
