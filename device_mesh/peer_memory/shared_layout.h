// What lies in the memory that the ranks of one host share, as each of them sees it, and
// where in it there is room for more. Pure; whoever writes a field is named. See
// docs/design/shared_memory.md.
//
//   a rank's control segment   ControlPage, then one MessageLane for each rank of the job
//   a rank's further segments  blocks: a BlockHeader, then the bytes
#pragma once

#include "device_mesh/collectives/notice.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace fsdp::internal {

// Where a block of a rank lies: its segment's place in that rank's list, and the offset
// of its header there. 0: none.
class BlockRef {
 public:
  BlockRef() = default;
  explicit BlockRef(uint64_t word) : word_(word) {}
  BlockRef(uint32_t segment, uint64_t offset) : word_((uint64_t{segment} + 1) << 40 | offset) {}
  explicit operator bool() const { return word_ != 0; }
  uint64_t word() const { return word_; }
  uint32_t segment() const { return static_cast<uint32_t>(word_ >> 40) - 1; }
  uint64_t offset() const { return word_ & ((uint64_t{1} << 40) - 1); }
  bool operator==(const BlockRef&) const = default;

 private:
  uint64_t word_ = 0;
};

struct alignas(64) BlockHeader {
  // Messages about it that have not been read yet. The owner adds, receivers take off.
  std::atomic<uint32_t> readers;
};

// A message, in a block of the sender's.
struct alignas(64) MessageNode {
  std::atomic<uint64_t> next;  // BlockRef of the one that was sent to the same rank after it
  uint64_t channel;            // of a process group
  uint64_t number;             // in the channel, from that rank
  NoticeBytes notice;
  uint64_t block;          // BlockRef of what came with it; 0: nothing
  uint64_t offset, bytes;  // behind the block's header
};

struct SharedSegmentEntry {
  int32_t fd;
  uint64_t bytes;
  uint64_t mark;
};

// kEnded: its program is over, by the end of main() or exit().
enum class Whereabouts : uint32_t { kHere, kLeft, kEnded };

// Written by its rank, but for the bell.
struct alignas(64) ControlPage {
  static constexpr uint32_t kMaxSegments = 1024;

  // Rung by others when they have sent this rank something, or read something of its.
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;  // its threads that may be waiting for the bell
  std::atomic<Whereabouts> whereabouts;
  std::atomic<uint32_t> segments;  // how many of these are there
  SharedSegmentEntry entries[kMaxSegments];
};

// Between a rank and one other, written by the rank.
struct alignas(64) MessageLane {
  std::atomic<uint64_t> first;   // BlockRef of the first message to the other
  std::atomic<uint64_t> passed;  // messages of the other that it has taken off the list
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Where blocks lie in memory that grows by segments and never moves.
//
//   BlockPlaces places;
//   auto place = places.take(1000);               // none: no segment has room
//   places.add_segment(0, 64, 1 << 20);           // its number, and the bytes it has
//   place = places.take(1000);
//   places.give_back(place, 1000);
//
// Sizes are rounded up to one of four per power of two, and what was given back is taken
// again for the same rounded size (segregated free lists; Wilson et al., "Dynamic storage
// allocation: a survey and critical review", 1995): the blocks of one training step are
// those of the next.
class BlockPlaces {
 public:
  // What a block of `bytes` takes: a multiple of 64, less than 5/4 of that and 64.
  static uint64_t rounded(uint64_t bytes);

  // An offset that is a multiple of 64; none where no segment has room.
  BlockRef take(uint64_t bytes);
  void give_back(BlockRef place, uint64_t bytes);
  // Bytes [begin, end) of the segment are there to be taken.
  void add_segment(uint32_t segment, uint64_t begin, uint64_t end);

 private:
  struct Rest {  // of a segment, not taken yet
    uint32_t segment;
    uint64_t begin, end;
  };
  std::vector<Rest> rests_;
  std::map<uint64_t, std::vector<BlockRef>> free_;  // by rounded size
};

}  // namespace fsdp::internal
