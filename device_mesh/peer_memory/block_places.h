// Where blocks lie in memory that grows by segments and never moves. Pure.
//
//   BlockPlaces places;
//   auto place = places.take(1000);               // none: no segment has room
//   places.add_segment(0, 64, 1 << 20);           // its number, and the bytes it has
//   place = places.take(1000);
//   places.give_back(*place, 1000);
//
// Sizes are rounded up to one of four per power of two, and what was given back is taken
// again for the same rounded size (segregated free lists; Wilson et al., "Dynamic storage
// allocation: a survey and critical review", 1995): the blocks of one training step are
// those of the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace fsdp::internal {

struct BlockPlace {
  uint32_t segment = 0;
  uint64_t offset = 0;  // a multiple of 64

  bool operator==(const BlockPlace&) const = default;
};

class BlockPlaces {
 public:
  // What a block of `bytes` takes: a multiple of 64, less than 5/4 of that and 64.
  static uint64_t rounded(uint64_t bytes);

  std::optional<BlockPlace> take(uint64_t bytes);
  void give_back(BlockPlace place, uint64_t bytes);
  // Bytes [begin, end) of the segment are there to be taken.
  void add_segment(uint32_t segment, uint64_t begin, uint64_t end);

 private:
  struct Rest {  // of a segment, not taken yet
    uint32_t segment;
    uint64_t begin, end;
  };
  std::vector<Rest> rests_;
  std::map<uint64_t, std::vector<BlockPlace>> free_;  // by rounded size
};

}  // namespace fsdp::internal
