// Messages that nobody waits for any more, since the ranks of their group do not agree on
// what is sent: they and their memory are kept as long as the group, which may still
// write there.
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"

#include <memory>

namespace fsdp::internal {

// Nothing when `message` is not in flight. Thread-safe.
void abandon(const Group& group, Pending& message, std::shared_ptr<const void> memory);

}  // namespace fsdp::internal
