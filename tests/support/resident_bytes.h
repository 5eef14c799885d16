// What of the parameters is there, wherever it lies.
#pragma once

#include "fully_shard/counters.h"

#include <cstdint>

namespace fsdp {

// Full parameters, copied or read where the shards lie.
inline int64_t resident_bytes(const Counters& counters) {
  return counters.unsharded_bytes + counters.in_place_bytes;
}

}  // namespace fsdp
