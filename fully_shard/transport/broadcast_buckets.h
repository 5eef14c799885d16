// How the bytes of tensors are put into buckets that are sent one after another: many
// small tensors share a message, and a large one needs no message of its size. Pure
// integers.
//
//   broadcast_buckets({10, 0, 25}, 16);
//   // {{0, 0, 10}, {2, 0, 6}} and {{2, 6, 16}} and {{2, 22, 3}}
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

struct BucketPiece {
  size_t tensor = 0;
  int64_t offset = 0;  // bytes, in the tensor
  int64_t bytes = 0;   // at least one
};
using Bucket = std::vector<BucketPiece>;

// nbytes: of each tensor. Every byte is in one bucket, in the order of the tensors; every
// bucket but the last holds `limit` bytes. REQUIRES: limit > 0.
inline std::vector<Bucket> broadcast_buckets(const std::vector<int64_t>& nbytes, int64_t limit) {
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
