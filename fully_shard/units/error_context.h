// What error messages of one call begin and end with: the function and the rank.
#pragma once

#include <string>

namespace fsdp::internal {

struct ErrorContext {
  std::string caller;  // "auto_shard"
  std::string rank;    // " (rank 0)", the message's end; empty where no mesh is known
};

}  // namespace fsdp::internal
