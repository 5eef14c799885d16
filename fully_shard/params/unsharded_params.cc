#include "fully_shard/params/unsharded_params.h"

#include "device_mesh/collectives/scratch_memory.h"
#include "fully_shard/transport/packed_copy.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace fsdp::internal {

UnshardedParams::UnshardedParams(ShardedState start, int64_t shard_count, GroupAccounts accounts)
    : sharded_state_(start), accounts_(std::move(accounts)), shard_count_(shard_count) {}

UnshardedParams::~UnshardedParams() {
  drop_gather();
  memory_.free();
  if (full_.defined()) accounts_.add(&Counters::unsharded_bytes, -full_.numel());
}

char* UnshardedParams::data(const PackedLayout& layout, int64_t index) const {
  return static_cast<char*>(full_.data_ptr()) + shard_count_ * layout.chunk(index).offset;
}

at::Tensor UnshardedParams::elements(const PackedLayout& layout, int64_t index, int64_t rank,
                                     at::ScalarType dtype) const {
  const auto& chunk = layout.chunk(index);
  const auto whole = full_.narrow(0, shard_count_ * chunk.offset, chunk.extent.nbytes());
  return view_of_part(whole.view(dtype), chunk.part(rank));
}

void UnshardedParams::use_for_shards() {
  const auto here = DeviceStream::current(full_.device());
  memory_.use_after_others(here, StreamWait::kWriteBackAfterWrites);
  wrote_shards_.add(here);
}

void UnshardedParams::await_what_went_to_shards(const DeviceStream& issuer) {
  wrote_shards_.are_awaited_by(issuer, StreamWait::kGatherAfterWriteBack);
  wrote_shards_.clear();
}

void UnshardedParams::issue(const PackedRow& own, const Issue& issue) {
  issuer_ = DeviceStream::current(own.bytes.device());
  gather_ = own.transport.gather(own.bytes, issue);
  issued(own.layout, own.transport.shard_count());
}

void UnshardedParams::issue_read(std::unique_ptr<SharedRead> read, const PackedLayout& layout) {
  issuer_ = DeviceStream::current(c10::kCPU);
  read_ = read.get();
  gather_ = std::move(read);
  issued(layout, shard_count_);
}

void UnshardedParams::issued(const PackedLayout& layout, int64_t rows) {
  gathered_layout_ = &layout;
  gathered_rows_ = rows;
  accounts_.add(&Counters::all_gather_bytes, (rows - 1) * layout.row_bytes());
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
  const auto bytes = shard_count_ * layout.row_bytes();
  GatheredRows rows;
  do {
    rows = wait_for_rows();
    if (!full_.defined()) full_ = scratch_memory({bytes}, at::kByte, device);
    unpack_rows({rows, *gathered_layout_, gathered_rows_}, {full_, layout, shard_count_});
  } while (read_ != nullptr && !read_->was_right());
  accounts_.add(&Counters::unsharded_bytes, bytes);
  for (size_t i = 0; i < params.size(); ++i) {
    auto* const storage = params[i].storage();
    if (storage != nullptr) storage->fill(data(layout, static_cast<int64_t>(i)));
  }
  memory_.ready(DeviceStream::current(device));
  if (*issuer_ != DeviceStream::current(device))
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, memory_.when_ready());
  sharded_state_.filled();
  WhatRanksSaid said{rows.words()};
  if (read_ != nullptr) said.tables = read_->other_tables();
  rows = {};
  release_gather();
  return said;
}

GatheredRows UnshardedParams::wait_for_rows() {
  try {
    const WaitClock clock(accounts_);
    return gather_->wait();
  } catch (...) {
    full_.reset();
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
  memory_.free();
  for (const auto& param : params) {
    if (param.storage() != nullptr) param.storage()->empty();
  }
  accounts_.add(&Counters::unsharded_bytes, -full_.numel());
  full_.reset();
}

void UnshardedParams::poison() {
  if (full_.is_cpu()) std::fill_n(static_cast<char*>(full_.data_ptr()), full_.numel(), '\xff');
  poisoned_ = full_;
}

}  // namespace fsdp::internal
