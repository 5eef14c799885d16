// The collective this process issued last, for the case that the transport ends the
// process instead of throwing: it is then printed to stderr before the process ends.
// Thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::internal {

// `what`: operation and unit. The first call puts a printer in front of the terminate
// handler in place.
void record_issued(const std::string& what, uint32_t sequence, int64_t global_rank);

}  // namespace fsdp::internal
