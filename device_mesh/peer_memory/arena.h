// The memory of one rank that the others of its host can read: blocks that are taken,
// lent to readers, and taken again when the last of them is done.
//
//   const at::Tensor rows = arena->memory(bytes);     // uint8 [bytes]
//   const auto lent = *Arena::lent_by(rows);          // a block of an arena
//   lent.header->readers += 2;                        // two messages tell of it
//
// Thread-safe. Grows by segments, each as large as all before it up to 64 MiB, or as what
// is asked for.
#pragma once

#include "device_mesh/peer_memory/shared_layout.h"
#include "device_mesh/peer_memory/shared_segment.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace fsdp::internal {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // `added` is told of each segment before blocks of it are given; it may refuse one by
  // throwing.
  explicit Arena(std::function<void(const SegmentName&)> added);

  // Not initialised, 64-byte aligned; goes back when the tensor is gone and nobody reads.
  // Throws c10::Error that says what the system refuses, and what is used already.
  at::Tensor memory(int64_t bytes);
  // The block that `tensor` lies in, and where; none for memory of anything else.
  struct Lent {
    const Arena* arena;
    BlockRef block;
    BlockHeader* header;
    uint64_t offset;  // behind the header
  };
  static std::optional<Lent> lent_by(const at::Tensor& tensor);

  // A block for `bytes` that nobody lends; its first byte is behind the header.
  struct Block {
    BlockRef ref;
    char* data;
    uint64_t bytes;
  };
  Block take(uint64_t bytes);
  // Free when its readers are done.
  void give_back(const Block& block);

 private:
  struct Owned;
  void add_segment_for(uint64_t bytes);
  BlockHeader* header_of(const Block& block) const;
  void sweep();

  std::function<void(const SegmentName&)> added_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  uint64_t bytes_ = 0;  // of all segments
  BlockPlaces places_;
  std::vector<Block> still_read_;
};

}  // namespace fsdp::internal
