#include "fully_shard/transport/broadcast_buckets.h"

#include <algorithm>

namespace fsdp::internal {

std::vector<Bucket> broadcast_buckets(const std::vector<int64_t>& nbytes, int64_t limit) {
  std::vector<Bucket> buckets;
  int64_t room = 0;  // in the last one
  for (size_t tensor = 0; tensor < nbytes.size(); ++tensor) {
    for (int64_t offset = 0; offset < nbytes[tensor];) {
      if (room == 0) {
        buckets.emplace_back();
        room = limit;
      }
      const auto bytes = std::min(room, nbytes[tensor] - offset);
      buckets.back().push_back({tensor, offset, bytes});
      offset += bytes;
      room -= bytes;
    }
  }
  return buckets;
}

}  // namespace fsdp::internal
