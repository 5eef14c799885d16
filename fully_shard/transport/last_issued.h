// The collective this process issued last, for the case that the transport ends the
// process instead of throwing (Gloo does when two ranks' messages differ in size): it is
// then printed to stderr before the process ends. Thread-safe.
#pragma once

#include "fully_shard/transport/stamp.h"

#include <cstdint>
#include <string>

namespace fsdp::internal {

// The first call puts a printer in front of the terminate handler in place.
void record_issued(CollectiveKind kind, const std::string& unit, uint32_t sequence, int64_t rank);

}  // namespace fsdp::internal
