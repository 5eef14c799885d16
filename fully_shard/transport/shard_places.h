// Where one rank's shards of one unit lie in memory that the other ranks read: in a block
// that all ranks have in common, where each parameter lies whole, or in another one of
// the same layout that is this rank's. They may go to another place, so that what was
// there stays for ranks that still read it; tensors of bytes() go along.
//
//   ShardPlaces places(options, shards);
//   tell(places.word());                              // for other ranks' at(rank, word)
//   const at::Tensor left = places.move(place);       // as it was; not written any more
//
// The common block is made by one of the ranks. The others wait for it with patience, and
// begin in a block of their own where it does not come: making shards is local.
//
// Used by one thread at a time. Below: the waits for a peer's word, and how long they
// last.
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Work;
}

namespace fsdp::internal {

class PeerChannel;
class PeerReceive;

// Waits for one other rank of a mesh dimension whose ranks share memory, and the end of
// the dimension's collectives where these find that ranks do not belong together. Nothing
// is announced, so ranks may wait in any order.

// Until `work`, of PeerChannel, is over, which is up to that rank of the group. Throws as
// IssueLog::await_apart(). what: in errors of all ranks.
void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what);

// A bounded wait for ranks that are probably about to come; a correct program may also
// have them wait for this rank elsewhere. After one wait that ended in vain, later ones
// return at once, until ranks have come before anybody waited for them. A wait also ends
// when a rank of the channel is gone: whatever needs that rank reports it.
struct Patience {
  std::chrono::milliseconds most{500};
  bool was_in_vain = false;

  // False: it is not over, and not waited for any more.
  bool await(const PeerChannel& channel, c10::function_ref<bool()> is_over);
};

// Throws DistBackendError, and ends all collectives of the dimension, on the others'
// ranks too.
[[noreturn]] void end_collectives(const Collectives& collectives, const std::string& why);

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
