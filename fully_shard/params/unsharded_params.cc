#include "fully_shard/params/unsharded_params.h"

#include <utility>

namespace fsdp::internal {

UnshardedParams::UnshardedParams(ShardedState start, int64_t shard_count, GroupAccounts accounts)
    : sharded_state_(start),
      accounts_(std::move(accounts)),
      shard_count_(shard_count),
      gather_(accounts_),
      memory_(accounts_) {}

UnshardedParams::~UnshardedParams() {
  drop_gather();
  streams_.free();
}

void UnshardedParams::use_for_shards() {
  const auto here = DeviceStream::current(memory_.bytes().device());
  streams_.use_after_others(here, StreamWait::kWriteBackAfterWrites);
  wrote_shards_.add(here);
}

void UnshardedParams::await_what_went_to_shards(const DeviceStream& issuer) {
  wrote_shards_.are_awaited_by(issuer, StreamWait::kGatherAfterWriteBack);
  wrote_shards_.clear();
}

void UnshardedParams::issue(const PackedRow& own, const Issue& issue) {
  const auto issuer = DeviceStream::current(own.bytes.device());
  issued(own.transport.gather(own.bytes, issue), issuer,
         {.layout = &own.layout, .count = own.transport.shard_count()});
}

void UnshardedParams::issue_read(std::unique_ptr<SharedRead> read, const ShardBuffer& shards) {
  read_ = read.get();
  issued(std::move(read), DeviceStream::current(c10::kCPU),
         {&shards.layout(), shard_count_, shards.arrangement()});
}

void UnshardedParams::issued(std::unique_ptr<Gather> gather, const DeviceStream& issuer,
                             const Rows& rows) {
  rows_ = rows;
  accounts_.add(&Counters::all_gather_bytes, (rows.count - 1) * rows.layout->row_bytes());
  sharded_state_.gather_issued();
  gather_.issued(std::move(gather), issuer);
}

UnshardedParams::WhatRanksSaid UnshardedParams::fill(const PackedLayout& layout,
                                                     const std::vector<FSDPParam>& params,
                                                     c10::Device device) {
  GatheredRows rows;
  do {
    rows = wait_for_rows();
    fill_memory(rows, layout, device);
  } while (read_ != nullptr && !read_->was_right());
  memory_.show(layout, params);
  streams_.ready(DeviceStream::current(device));
  gather_.rows_were_read(streams_.when_ready());
  sharded_state_.filled();
  WhatRanksSaid said{rows.words()};
  if (read_ != nullptr) said.tables = read_->other_tables();
  rows = {};
  read_ = nullptr;
  gather_.release();
  return said;
}

void UnshardedParams::fill_memory(const GatheredRows& rows, const PackedLayout& layout,
                                  c10::Device device) {
  if (auto in_place = read_ != nullptr ? read_->in_place() : nullptr)
    return memory_.fill_in_place(std::move(in_place));
  memory_.fill_copy({rows, *rows_.layout, rows_.count, rows_.arrangement}, layout, device);
}

void UnshardedParams::leave_shards(const PackedLayout& layout,
                                   const std::vector<FSDPParam>& params) {
  if (memory_.is_in_place()) memory_.leave_shards(layout, params);
}

GatheredRows UnshardedParams::wait_for_rows() {
  try {
    return gather_.wait();
  } catch (...) {
    memory_.discard();
    gather_dropped();
    throw;
  }
}

void UnshardedParams::gather_dropped() {
  read_ = nullptr;
  sharded_state_.gather_dropped();
}

void UnshardedParams::await_and_drop() {
  if (read_ != nullptr) return drop_gather();  // it has read nothing yet
  try {
    gather_.await_and_drop();
  } catch (...) {
    gather_dropped();
    throw;
  }
  gather_dropped();
}

// NOLINTNEXTLINE(bugprone-exception-escape): what is gathering may be dropped
void UnshardedParams::drop_gather() noexcept {
  if (!sharded_state_.is_gathering()) return;
  gather_.drop();
  gather_dropped();
}

void UnshardedParams::empty(const std::vector<FSDPParam>& params) {
  sharded_state_.emptied();
  streams_.free();
  memory_.empty(params);
}

}  // namespace fsdp::internal
