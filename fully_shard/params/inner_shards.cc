#include "fully_shard/params/inner_shards.h"

#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/transport/packed_copy.h"

#include <exception>
#include <utility>

namespace fsdp::internal {

InnerShards::InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
                         c10::Device device)
    : info_(info),
      grid_(info.grid()),
      layout_(member_extents_of(params), grid_.inner_ranks),
      bytes_(device.is_meta()
                 ? at::Tensor()
                 : info.comm_context().transport().shard_memory(layout_.row_bytes(), device)) {
  if (!bytes_.defined()) return;
  info_.accounts().add(&Counters::inner_shard_bytes, layout_.row_bytes());
  memory_.ready(DeviceStream::current(device));
}

InnerShards::~InnerShards() {
  pieces_change();
  memory_.free();
  if (bytes_.defined()) info_.accounts().add(&Counters::inner_shard_bytes, -layout_.row_bytes());
}

void InnerShards::pieces_change() {
  is_stale_ = true;
  if (!is_under_way()) return;
  try {
    gather_->wait();
  } catch (const std::exception&) {
    // What it brought no longer matters; the log of issues knows that it failed.
  }
  release_gather();
}

void InnerShards::issue(const PackedRow& pieces, Issue issue) {
  if (!is_stale_ || is_under_way()) return;
  auto& outer = *info_.replicas();
  issuer_ = DeviceStream::current(pieces.bytes.device());
  pieces_ = &pieces.layout;
  const auto lengths = lengths_of_column(pieces.layout);
  if (issue.lengths != nullptr) issue.lengths = &lengths;
  gather_ = outer.gather(pieces.bytes, issue);
  staging_bytes_ = gather_->staging_bytes();
  const auto& accounts = info_.accounts();
  accounts.add(&Counters::staging_bytes, staging_bytes_);
  accounts.count(&Counters::outer_all_gathers);
  accounts.add(&Counters::outer_all_gather_bytes,
               (outer.shard_count() - 1) * pieces.layout.row_bytes());
}

std::vector<int64_t> InnerShards::lengths_of_column(const PackedLayout& pieces) const {
  std::vector<int64_t> lengths;
  if (pieces.lengths().empty()) return lengths;
  for (int64_t outer = 0; outer < grid_.outer_ranks; ++outer) {
    const auto place = grid_.place_of(grid_.inner_rank, outer);
    lengths.push_back(pieces.lengths()[static_cast<size_t>(place)]);
  }
  return lengths;
}

std::vector<NoticeWords> InnerShards::wait() {
  GatheredRows rows;
  try {
    const WaitClock clock(info_.accounts());
    rows = gather_->wait();
  } catch (...) {
    release_gather();
    throw;
  }
  const auto here = DeviceStream::current(bytes_.device());
  memory_.use_after_others(here, StreamWait::kFreeAfterUse);
  memory_.free();
  unpack(rows);
  memory_.ready(here);
  if (*issuer_ != here)
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, memory_.when_ready());
  auto words = rows.words();
  rows = {};
  release_gather();
  return words;
}

void InnerShards::unpack(const GatheredRows& rows) {
  auto* const shards = static_cast<char*>(bytes_.mutable_data_ptr());
  for (int64_t outer = 0; outer < grid_.outer_ranks; ++outer) {
    const auto place = grid_.place_of(grid_.inner_rank, outer);
    for (int64_t index = 0; index < layout_.size(); ++index) {
      const auto& piece = pieces_->chunk(index);
      const auto& shard = layout_.chunk(index);
      unpack_part(shards + shard.offset_on(grid_.inner_rank),
                  rows.row(outer) + piece.offset_on(place),
                  place_within({piece, place}, {shard, grid_.inner_rank}), bytes_.device());
    }
  }
}

// What is not waited for by now makes the current stream wait.
void InnerShards::release_gather() {
  const CurrentStream on_issuer(*issuer_);
  gather_.reset();
  info_.accounts().add(&Counters::staging_bytes, -std::exchange(staging_bytes_, 0));
}

PackedRow InnerShards::row() {
  memory_.use(DeviceStream::current(bytes_.device()));
  return {info_.comm_context().transport(), layout_, bytes_};
}

}  // namespace fsdp::internal
