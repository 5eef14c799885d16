// Where one rank's shards of one unit lie in memory that the other ranks read: in a block
// that all ranks have in common, where each parameter lies whole, or in another one of
// the same layout that is this rank's. They may go to another place, so that what was
// there stays for ranks that still read it; tensors of bytes() go along.
//
//   ShardPlaces places(channel, collectives, number, shards);
//   line.store(word, places.word());                  // for other ranks' at(rank, word)
//   const at::Tensor left = places.move(place);       // as it was; not written any more
//
// Used by one thread at a time. Local, but for the constructor.
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class PeerChannel;

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
  // Zeros. Memory that all have in common is made by one rank, for which the others wait.
  // Throws DistBackendError where it does not come, or ranks disagree about its size.
  ShardPlaces(std::shared_ptr<PeerChannel> channel, const Collectives& collectives, uint64_t number,
              const ShardsToShare& shards);

  const at::Tensor& bytes() const { return bytes_; }  // uint8 [bytes of a place]
  // Where they are.
  const at::Tensor& place() const { return place_; }
  uint64_t word() const { return word_of(place_); }
  // Where a rank has what it tells of by such a word.
  const char* at(int64_t rank, uint64_t word) const;

  // Undefined where a place has no bytes.
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

  at::Tensor make_common(const Collectives& collectives, uint64_t number) const;
  void copy_own(const at::Tensor& to) const;

  const std::shared_ptr<PeerChannel> channel_;
  const int64_t place_bytes_;
  const std::vector<ByteRange> own_;
  at::Tensor common_, place_;
  at::Tensor bytes_;  // of a storage that shows place_
};

// Ends the collectives of a dimension whose ranks have units of other sizes: this one of
// `bytes`, and `peer` of `others`.
[[noreturn]] void report_other_models(const Collectives& collectives, int64_t bytes, int64_t peer,
                                      int64_t others);

}  // namespace fsdp::internal
