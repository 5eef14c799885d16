// Numbers of messages in a channel (peer_memory.h). Pure.
#pragma once

#include <cstdint>

namespace fsdp::internal {

struct NumberRange {
  uint64_t first, last;
  bool contains(uint64_t number) const { return first <= number && number <= last; }
};

}  // namespace fsdp::internal
