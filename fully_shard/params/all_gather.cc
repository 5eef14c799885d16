#include "fully_shard/params/all_gather.h"

#include "fully_shard/transport/streams.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

// This rank's part of parameter `index` in the row: [n]. A view.
at::Tensor place_in_row(const RowMemory& row, const ShardGrid& grid, int64_t index,
                        const FSDPParam& param) {
  const auto& chunk = row.layout().chunk(index);
  return row.bytes()
      .narrow(0, chunk.offset_on(grid.place()), chunk.length(grid.place()))
      .view(param.meta().member_dtype());
}

void copy_each(const RowMemory& row, const ShardBuffer& shards,
               const std::vector<FSDPParam>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    place_in_row(row, shards.grid(), index, params[i]).copy_(shards.elements(index, params[i]));
  }
}

// All of a row in one launch: to another dtype; or from host memory, in which it is one
// piece; or both, in one launch each.
void copy_at_once(const RowMemory& row, const ShardBuffer& shards,
                  const std::vector<FSDPParam>& params) {
  const bool is_cast = any_is_cast(params);
  auto source = shards.bytes();
  if (shards.is_offloaded()) {
    source = is_cast ? at::empty_like(source, row.bytes().options()) : row.bytes();
    shards.copy_to(source);
  }
  if (!is_cast) return;
  std::vector<at::Tensor> from, to;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    from.push_back(shards.elements_in(source, index, params[i]));
    to.push_back(place_in_row(row, shards.grid(), index, params[i]));
  }
  at::_foreach_copy_(to, from);
}

}  // namespace

RowMemory::RowMemory(Transport& transport, PackedLayout layout, int64_t Counters::*counter,
                     GroupAccounts accounts)
    : transport_(transport),
      layout_(std::move(layout)),
      counter_(counter),
      accounts_(std::move(accounts)) {}

void RowMemory::allocate(at::Tensor bytes) {
  free();
  bytes_ = std::move(bytes);
  accounts_.add(counter_, bytes_.numel());
}

void RowMemory::refill() {
  streams_.use_after_others(DeviceStream::current(bytes_.device()), StreamWait::kFreeAfterUse);
  streams_.free();
}

PackedRow RowMemory::row() {
  streams_.use(DeviceStream::current(bytes_.device()));
  return {transport_, layout_, bytes_};
}

void RowMemory::free() {
  if (!exists()) return;
  accounts_.add(counter_, -bytes_.numel());
  streams_.free();
  bytes_.reset();
}

bool are_staged(const std::vector<FSDPParam>& params, const ShardBuffer& shards) {
  return shards.is_offloaded() || any_is_cast(params);
}

std::unique_ptr<RowMemory> make_staging(const std::vector<FSDPParam>& params,
                                        const ShardBuffer& shards, Transport& transport,
                                        GroupAccounts accounts) {
  if (!are_staged(params, shards)) return nullptr;
  const auto& grid = shards.grid();
  return std::make_unique<RowMemory>(
      transport, PackedLayout(cut_over(member_extents_of(params), grid), grid.count()),
      &Counters::staging_bytes, std::move(accounts));
}

PackedRow stage(RowMemory& staging, const ShardBuffer& shards,
                const std::vector<FSDPParam>& params) {
  const auto device = shards.member_device();
  staging.allocate(staging.transport().staging_memory(staging.layout().row_bytes(), device));
  device.is_cpu() ? copy_each(staging, shards, params) : copy_at_once(staging, shards, params);
  return {staging.transport(), staging.layout(), staging.bytes()};  // no other stream uses it
}

void AllGather::start(const PackedRow& own, const Issue& issue) {
  const auto issuer = DeviceStream::current(own.bytes.device());
  gather_.emplace(own.transport.gather(own.bytes, issue));
  layout_ = &own.layout;
  ranks_ = own.transport.shard_count();
  accounts_.add(&Counters::staging_bytes, gather_->staging_bytes());
  issuer_ = issuer;
}

void AllGather::start_read(std::unique_ptr<SharedRead> read, const PackedLayout& layout,
                           int64_t ranks) {
  read_ = std::move(read);
  layout_ = &layout;
  ranks_ = ranks;
  issuer_ = DeviceStream::current(c10::kCPU);
}

GatheredRows AllGather::wait() {
  try {
    const WaitClock clock(accounts_);
    return read_ != nullptr ? read_->wait() : gather_->wait();
  } catch (...) {
    drop();
    throw;
  }
}

void AllGather::rows_were_read(const DeviceEvent& read) {
  if (*issuer_ != DeviceStream::current(issuer_->device()))
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, read);
}

// Destroying a gather that was not waited for makes the current stream wait for it, which
// is its issuer's here.
void AllGather::release() {
  const CurrentStream on_issuer(*issuer_);
  const auto staging_bytes = gather_ ? gather_->staging_bytes() : 0;
  gather_.reset();
  read_.reset();
  accounts_.add(&Counters::staging_bytes, -staging_bytes);
}

void AllGather::wait_and_tell_issuer() {
  gather_->wait();
  make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, DeviceStream::current(issuer_->device()));
}

// What may throw below is a broken invariant, which ends the process here.
// NOLINTNEXTLINE(bugprone-exception-escape)
void AllGather::drop() noexcept {
  if (!exists()) return;
  try {
    if (gather_ && *issuer_ != DeviceStream::current(issuer_->device())) wait_and_tell_issuer();
  } catch (const std::exception&) {
    // What it brought no longer matters.
  }
  release();
}

void AllGather::await_and_drop() {
  if (read_ != nullptr) return drop();  // it has read nothing yet
  try {
    const WaitClock clock(accounts_);
    wait_and_tell_issuer();
  } catch (...) {
    drop();
    throw;
  }
  release();
}

}  // namespace fsdp::internal
