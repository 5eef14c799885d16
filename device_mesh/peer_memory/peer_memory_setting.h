// What whoever starts the job says about memory that ranks share: the variable
// FSDP_PEER_MEMORY of the environment.
#pragma once

#include <cstdint>

namespace fsdp::internal {

enum class PeerMemorySetting : uint8_t {
  kOff,   // off: ranks of one host use Gloo, all of them where one says so
  kCopy,  // copy: this rank copies the others' shards, as is better between memory nodes
  kOn,    // on, or no variable: it reads them where they lie, where it can
};

// Throws ValueError for another value. Local.
PeerMemorySetting peer_memory_setting();

}  // namespace fsdp::internal
