// The unsharded parameters of a group while they are there (PyTorch's unsharded_param, of
// all parameters of a group): the all-gather that brings them, the memory they lie in,
// and the storages of the members that show it. Other files call them the unsharded copy,
// as opposed to the shards. What may be done when is ShardedStateMachine's business
// (sharded_state.h); an illegal step is a std::logic_error.
//
// What was filled is memory of the stream that did so; the gather's rows are memory of
// the one that issued it.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/gather_in_flight.h"
#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/sharded_state.h"
#include "fully_shard/params/unsharded_memory.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shared_read.h"
#include "fully_shard/transport/stream_memory.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

// What a rank sends when a group is gathered, and the ranks that it goes to.
struct PackedRow {
  Transport& transport;
  const PackedLayout& layout;  // of every rank's row; outlives the gather
  at::Tensor bytes;            // memory of the transport
};

class UnshardedParams {
 public:
  // `start` is kSharded, or kNeverSharded for good.
  UnshardedParams(ShardedState start, int64_t shard_count, GroupAccounts accounts);
  ~UnshardedParams();
  UnshardedParams(const UnshardedParams&) = delete;

  const ShardedStateMachine& sharded_state() const { return sharded_state_; }
  void hold() { sharded_state_.hold(); }
  void release() { sharded_state_.release(); }

  // Issues the gather of `own` with the other ranks' rows; does not block. Collective
  // over the transport's ranks.
  void issue(const PackedRow& own, const Issue& issue);
  // The same of shards that this rank reads by itself; local.
  void issue_read(std::unique_ptr<SharedRead> read, const ShardBuffer& shards);
  bool is_reading() const { return read_ != nullptr; }
  // Waits for the gather and fills the members' storages; `layout`: of all shards, in the
  // members' dtypes. After a failure the group is sharded again.
  struct WhatRanksSaid {
    std::vector<NoticeWords> words;
    // Of a read alone (SharedRead::other_tables); else empty.
    std::vector<std::vector<uint64_t>> tables = {};
  };
  WhatRanksSaid fill(const PackedLayout& layout, const std::vector<FSDPParam>& params,
                     c10::Device device);
  const UnshardedMemory& memory() const { return memory_; }
  // The members show a copy of what they show in place; nothing where they show one.
  void leave_shards(const PackedLayout& layout, const std::vector<FSDPParam>& params);
  // The calling thread's stream is about to use the parameters. REQUIRES: unsharded.
  void use() { streams_.use(DeviceStream::current(memory_.bytes().device())); }
  // The same, to copy what operators on any stream have written to it to the shards.
  void use_for_shards();
  // `issuer` of a gather waits for that.
  void await_what_went_to_shards(const DeviceStream& issuer);
  // Waits for a gather in flight, and throws if it failed; what it brought is dropped
  // either way.
  void await_and_drop();
  // The same, and no failure shows.
  void drop_gather() noexcept;
  void empty(const std::vector<FSDPParam>& params);
  void poison() { memory_.poison(); }

 private:
  // The rows that a gather brings.
  struct Rows {
    const PackedLayout* layout = nullptr;
    int64_t count = 0;
    Arrangement arrangement = Arrangement::kRow;
  };
  void issued(std::unique_ptr<Gather> gather, const DeviceStream& issuer, const Rows& rows);
  GatheredRows wait_for_rows();
  void fill_memory(const GatheredRows& rows, const PackedLayout& layout, c10::Device device);
  void gather_dropped();

  ShardedStateMachine sharded_state_;
  GroupAccounts accounts_;
  int64_t shard_count_;
  GatherInFlight gather_;
  SharedRead* read_ = nullptr;  // the gather, where this rank reads by itself
  Rows rows_;                   // of the gather
  UnshardedMemory memory_;      // filled while unsharded
  StreamMemory streams_{StreamWait::kUseAfterFill, StreamWait::kFreeAfterUse};  // memory_
  StreamSet wrote_shards_;  // since the last gather was issued
};

}  // namespace fsdp::internal
