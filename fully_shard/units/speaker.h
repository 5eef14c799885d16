// Which function an error message is of.
#pragma once

#include <string>

namespace fsdp::internal {

struct Speaker {
  std::string caller;  // "auto_shard"
  std::string rank;    // " (rank 0)", the message's end; empty where no mesh is known
};

}  // namespace fsdp::internal
