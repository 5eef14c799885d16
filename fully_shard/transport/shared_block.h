// The memory in which a rank tells the others of its shards of one unit
// (shared_shards.h): a line of words (shard_versions.h), and behind it the table of what
// it has written last. A version that is kept for late ranks has a head of its own, with
// its table behind it.
#pragma once

#include "fully_shard/transport/shard_versions.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fsdp::internal {

// The first bytes of a block.
struct BlockHead {
  static constexpr int64_t kBytes = 256;
  std::array<std::atomic<uint64_t>, VersionWord::kCount> words;
  int64_t bytes, table;  // of ShardsToShare
};
static_assert(sizeof(BlockHead) <= BlockHead::kBytes);

// The first bytes of a kept version. Its table is behind them.
struct KeptHead {
  static constexpr int64_t kBytes = 64;
  uint64_t place;
};
static_assert(sizeof(KeptHead) <= KeptHead::kBytes);

inline const BlockHead& block_head(const char* block) {
  return *reinterpret_cast<const BlockHead*>(block);
}
inline BlockHead& block_head(char* block) { return *reinterpret_cast<BlockHead*>(block); }

// Of another rank's block.
class PeersLine {
 public:
  explicit PeersLine(const char* block) : head_(block_head(block)) {}
  uint64_t load(size_t word) const { return head_.words[word].load(std::memory_order_acquire); }
  static void read_fence() { std::atomic_thread_fence(std::memory_order_acquire); }

 private:
  const BlockHead& head_;
};

class OwnLine {
 public:
  explicit OwnLine(char* block) : head_(block_head(block)) {}
  void store(size_t word, uint64_t value) {
    head_.words[word].store(value, std::memory_order_relaxed);
  }
  void release(size_t word, uint64_t value) {
    head_.words[word].store(value, std::memory_order_release);
  }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

 private:
  BlockHead& head_;
};

}  // namespace fsdp::internal
