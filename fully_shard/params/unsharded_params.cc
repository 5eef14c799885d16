#include "fully_shard/params/unsharded_params.h"

#include <exception>
#include <utility>

namespace fsdp::internal {

UnshardedParams::UnshardedParams(ShardedState start, int64_t shard_count, GroupAccounts accounts)
    : sharded_state_(start),
      accounts_(std::move(accounts)),
      shard_count_(shard_count),
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
  issuer_ = DeviceStream::current(own.bytes.device());
  gather_ = own.transport.gather(own.bytes, issue);
  issued({.layout = &own.layout, .count = own.transport.shard_count()});
}

void UnshardedParams::issue_read(std::unique_ptr<SharedRead> read, const ShardBuffer& shards) {
  issuer_ = DeviceStream::current(c10::kCPU);
  read_ = read.get();
  gather_ = std::move(read);
  issued({&shards.layout(), shard_count_, shards.arrangement()});
}

void UnshardedParams::issued(const Rows& rows) {
  rows_ = rows;
  accounts_.add(&Counters::all_gather_bytes, (rows.count - 1) * rows.layout->row_bytes());
  sharded_state_.gather_issued();
  staging_bytes_ = gather_->staging_bytes();
  accounts_.add(&Counters::staging_bytes, staging_bytes_);
}

// What is not waited for by now makes the current stream wait.
void UnshardedParams::release_gather() {
  const CurrentStream on_issuer(*issuer_);
  read_ = nullptr;
  gather_.reset();
  accounts_.add(&Counters::staging_bytes, -std::exchange(staging_bytes_, 0));
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
  if (*issuer_ != DeviceStream::current(device))
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, streams_.when_ready());
  sharded_state_.filled();
  WhatRanksSaid said{rows.words()};
  if (read_ != nullptr) said.tables = read_->other_tables();
  rows = {};
  release_gather();
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
    const WaitClock clock(accounts_);
    return gather_->wait();
  } catch (...) {
    memory_.discard();
    drop_gather();
    throw;
  }
}

// The stream that issued the gather owns its rows.
void UnshardedParams::wait_and_tell_issuer() {
  gather_->wait();
  make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, DeviceStream::current(issuer_->device()));
}

void UnshardedParams::await_and_drop() {
  if (read_ != nullptr) return drop_gather();  // it has read nothing yet
  try {
    const WaitClock clock(accounts_);
    wait_and_tell_issuer();
  } catch (...) {
    drop_gather();
    throw;
  }
  drop_gather();
}

// What may throw below is a broken invariant, which ends the process here.
// NOLINTNEXTLINE(bugprone-exception-escape)
void UnshardedParams::drop_gather() noexcept {
  if (!sharded_state_.is_gathering()) return;
  try {  // whoever drops it may write the shards that it reads
    if (*issuer_ != DeviceStream::current(issuer_->device())) wait_and_tell_issuer();
  } catch (const std::exception&) {
    // What it brought no longer matters.
  }
  release_gather();
  sharded_state_.gather_dropped();
}

void UnshardedParams::empty(const std::vector<FSDPParam>& params) {
  sharded_state_.emptied();
  streams_.free();
  memory_.empty(params);
}

}  // namespace fsdp::internal
