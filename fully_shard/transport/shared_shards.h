// One rank's shards of one unit in memory that the other ranks of the dimension read by
// themselves: a read needs nobody else, so ranks may read in any order and number. Which
// version a read is of, and what a writer has to do for readers that come late, is
// decided in shard_versions.h. Local; nothing here announces.
//
//   shards.begin_write(unit);           // an operator is about to write shards.bytes()
//   ...
//   shards.end_write({hash, table});    // has written
//
//   auto read = shards.read("read of the shards of unit 'l0'", SharedShards::ReadBy::kCopy);
//   do {
//     const GatheredRows rows = read->wait();   // until every rank has written as often
//     copy(rows.row(r), ...);
//   } while (!read->was_right());               // a rank has begun to write meanwhile
//
// What read() gives is a SharedRead. Where all ranks have their shards in
// one piece of memory, a reader need not copy them: read->in_place() shows it, until this
// rank writes the shards itself.
//
// Used by one thread at a time.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/operations.h"
#include "device_mesh/peer_memory/peer_memory.h"
#include "fully_shard/transport/shard_places.h"
#include "fully_shard/transport/shard_versions.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

class PeerChannel;
class PeerReceive;

// What a rank says about a version of its shards, for readers to compare: a word, and,
// where it is not 0, the table that it stands for.
struct ShardValues {
  uint64_t word = 0;
  std::vector<uint64_t> table = {};
};

class ReadInPlace;
class SharedRead;

class SharedShards : public std::enable_shared_from_this<SharedShards> {
 public:
  struct Options {
    std::shared_ptr<PeerChannel> channel;
    Collectives gathers;  // whose failures end reads, too
    uint64_t number = 0;  // the same on all ranks, another one for each
    ShardsToShare shards;
    // How long this rank waits before it writes what others may still want to read, and
    // so has to leave; and for the common block, before it begins in one of its own.
    // Shared by the units of a mesh dimension.
    std::shared_ptr<Patience> patience = std::make_shared<Patience>();
    std::shared_ptr<Patience> patience_to_begin = std::make_shared<Patience>();
  };
  // Zeros, which count as being written until end_write(). Every rank of the channel
  // makes one of that number. May wait (Options::patience_to_begin); throws as
  // ShardPlaces.
  explicit SharedShards(Options options);
  ~SharedShards();
  SharedShards(const SharedShards&) = delete;
  SharedShards& operator=(const SharedShards&) = delete;

  const at::Tensor& bytes() const { return places_.bytes(); }  // uint8 [bytes]
  // That have written it, begun or over.
  uint64_t operators() const { return versions_.version().count; }

  // An operator is about to write. May wait (Options::patience), and take memory, where
  // what is there is left for others. Throws c10::Error where there is no memory for it,
  // and DistBackendError, which ends all collectives of the dimension, where a rank reads
  // in place what would be written. unit: in that error. REQUIRES: no ReadInPlace of this
  // rank's.
  void begin_write(c10::function_ref<std::string()> unit);
  // It has written. values: of the version that this makes.
  void end_write(const ShardValues& values);
  // The start values are there.
  void end_of_start() { versions_.close(); }
  // A backward of all ranks has ended.
  void end_of_backward();
  // An alias of the bytes is given out, through which they may be written before
  // begin_write(). From now on they stay in their place, and other ranks read copies, of
  // what is there when this rank reads, and at the ends of backwards.
  void give_out();

  // Reads the version that is this rank's when SharedRead::wait() is called. what: names
  // the read in errors, on all ranks. by: kInPlace where that can be and is set
  // (peer_memory.h). Throws where the ranks' collectives have failed.
  enum class ReadBy : uint8_t { kCopy, kInPlace };
  std::unique_ptr<SharedRead> read(std::string what, ReadBy by);

 private:
  friend class ReadInPlace;
  friend class SharedRead;
  // The last version of a run. `head` tells where it is, and has its table.
  struct Kept {
    uint64_t run;
    at::Tensor head, place;
  };

  // A block of a rank: its line, then the table of what it has written last.
  struct Peer {
    int64_t rank;
    c10::intrusive_ptr<PeerReceive> coming;  // its block
    const char* block = nullptr;             // null: it has not come
  };

  char* own_block() const;
  int64_t table_bytes() const;
  void await_block(Peer& peer);
  uint64_t past_of(Peer& peer);
  bool is_common_free();
  uint64_t keep();
  void forget_kept();
  void await_room();
  bool is_wanted_by_others();
  void open_run();
  void publish();
  void end_operator();
  ShardVersion close_version();
  void check_not_read(c10::function_ref<std::string()> unit) const;

  const Options options_;
  const PeerMemorySetting setting_ = peer_memory_setting();
  at::Tensor block_;
  ShardPlaces places_;
  ShardVersions versions_;
  int64_t reads_in_place_ = 0;
  uint64_t said_ = 0;
  std::vector<Peer> peers_;  // the other ranks
  std::vector<Kept> kept_;
};

// Whole parameters that are read where all ranks have their shards. Nobody writes there
// as long as this rank does not, and other ranks' writes go elsewhere.
class ReadInPlace {
 public:
  explicit ReadInPlace(std::shared_ptr<SharedShards> shards) : shards_(std::move(shards)) {
    ++shards_->reads_in_place_;
  }
  ~ReadInPlace() { --shards_->reads_in_place_; }
  ReadInPlace(const ReadInPlace&) = delete;

  const at::Tensor& bytes() const { return shards_->places_.common(); }

 private:
  const std::shared_ptr<SharedShards> shards_;
};

// A read of all ranks' shards of one unit by this rank alone: where each rank has the
// version, until it has it, and whether what was read is of it. Local.
class SharedRead {
 public:
  SharedRead(std::shared_ptr<SharedShards> shards, std::string what, SharedShards::ReadBy by)
      : shards_(std::move(shards)), what_(std::move(what)), by_(by) {}

  // May be called again. Throws DistBackendError, which ends all collectives of the
  // dimension, where ranks have written otherwise, have gone, or wait for one another.
  GatheredRows wait();
  // Null: they have to be copied from the rows that wait() gave. REQUIRES: wait().
  std::unique_ptr<ReadInPlace> in_place() const;
  // Whether what was read since wait() is of its version; false: wait() again.
  bool was_right();
  // REQUIRES: was_right(). The tables of the ranks whose word differs from this one's, by
  // rank; empty for the others.
  const std::vector<std::vector<uint64_t>>& other_tables() const { return tables_; }

 private:
  // Where a rank's values are.
  struct Source {
    const char* values;
    const char* table;
    uint64_t said;
    bool is_in_common;
    const char* live_in = nullptr;  // the block whose line says whether they still are
  };

  Source find(SharedShards::Peer& peer) const;
  Source kept_at(int64_t rank, const char* head, uint64_t said) const;
  [[noreturn]] void report(const SharedShards::Peer& peer) const;
  std::string version_in_words() const;

  const std::shared_ptr<SharedShards> shards_;
  const std::string what_;
  const SharedShards::ReadBy by_;
  ShardVersion version_;
  std::vector<Source> sources_;  // by rank
  std::vector<std::vector<uint64_t>> tables_;
};

}  // namespace fsdp::internal
