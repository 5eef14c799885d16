// Where one rank's shards of one unit lie in memory that the other ranks read: in a block
// that all ranks have in common, where each parameter lies whole, or in another one of
// the same layout that is this rank's. They may go to another place, so that what was
// there stays for ranks that still read it; tensors of bytes() go along.
//
//   ShardPlaces places(options, shards);
//   line.store(word, places.word());                  // for other ranks' at(rank, word)
//   const at::Tensor left = places.move(place);       // as it was; not written any more
//
// The common block is made by one of the ranks. The others wait for it with patience, and
// begin in a block of their own where it does not come: making shards is local.
//
// Used by one thread at a time.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "fully_shard/transport/peer_waits.h"
#include "fully_shard/transport/shard_versions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

// The memory in which a rank tells the others of its shards of one unit
// (shared_shards.h): a line of words (shard_versions.h), and behind it the table of what
// it has written last. A version that is kept for late ranks has a head of its own, with
// its table behind it.

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

class PeerChannel;
class PeerReceive;

struct ByteRange {
  int64_t offset = 0, bytes = 0;
};

struct ShardsToShare {
  int64_t bytes = 0;                // of a place; the same on all ranks
  std::vector<ByteRange> own = {};  // of it, what is this rank's
  int64_t table = 0;                // words beside them; the same on all ranks
};

class ShardPlaces {
 public:
  struct Options {
    std::shared_ptr<PeerChannel> channel;
    Collectives collectives;
    uint64_t number = 0;                 // the same on all ranks, another one for each
    std::shared_ptr<Patience> patience;  // for the common block
  };
  // Zeros. Throws DistBackendError where ranks disagree about the size.
  ShardPlaces(Options options, const ShardsToShare& shards);
  ~ShardPlaces();
  ShardPlaces(const ShardPlaces&) = delete;

  const at::Tensor& bytes() const { return bytes_; }  // uint8 [bytes of a place]
  // Where they are.
  const at::Tensor& place() const { return place_; }
  uint64_t word() const { return word_of(place_); }
  // Where a rank has what it tells of by such a word. May wait for the common block.
  const char* at(int64_t rank, uint64_t word);

  // Whether the common block is there by now.
  bool has_common();
  // REQUIRES: has_common().
  const at::Tensor& common() const { return common_; }
  bool are_in_common() const { return common_.defined() && place_.is_same(common_); }
  static bool is_common(uint64_t word) { return word == kCommon; }
  uint64_t word_of(const at::Tensor& place) const;

  at::Tensor new_place() const;
  // The shards go to `place`; returns where they were.
  at::Tensor move(const at::Tensor& place);
  // A copy of them, in a place of its own.
  at::Tensor copy() const;

 private:
  static constexpr uint64_t kCommon = 0;

  int64_t owner() const;
  void make_or_expect_common();
  void take_common();
  void copy_own(const at::Tensor& to) const;

  const Options options_;
  const int64_t place_bytes_;
  const std::vector<ByteRange> own_;
  c10::intrusive_ptr<PeerReceive> coming_;  // the common block; null: this rank has made it
  at::Tensor common_, place_;
  at::Tensor bytes_;  // of a storage that shows place_
};

// Ends the collectives of a dimension whose ranks have units of other sizes: this one of
// `bytes`, and `peer` of `others`.
[[noreturn]] void report_other_models(const Collectives& collectives, int64_t bytes, int64_t peer,
                                      int64_t others);

}  // namespace fsdp::internal
