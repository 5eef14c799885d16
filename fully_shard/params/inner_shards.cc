#include "fully_shard/params/inner_shards.h"

#include "device_mesh/internal/profiler_range.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

InnerShards::InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
                         const ShardBuffer& shards)
    : info_(info),
      params_(params),
      shards_(shards),
      row_(info.comm_context().transport(),
           PackedLayout(member_extents_of(params), shards.grid().inner_ranks),
           &Counters::inner_shard_bytes, info.accounts()),
      staging_(make_staging(params, shards, *info.replicas(), info.accounts())),
      gather_(info.accounts()) {
  const auto device = shards.member_device();
  if (device.is_meta()) return;
  row_.allocate(row_.transport().shard_memory(layout().row_bytes(), device));
  row_.filled();
}

const PackedLayout& InnerShards::layout_of_pieces() const {
  return staging_ ? staging_->layout() : shards_.layout();
}

bool InnerShards::are_to_be_issued() const {
  return is_stale_ && !gather_.exists() && shards_.has_values();
}

void InnerShards::pieces_change() {
  is_stale_ = true;
  gather_.drop();
  if (staging_) staging_->free();
}

PackedRow InnerShards::pieces() {
  if (staging_) return stage(*staging_, shards_, params_);
  auto& outer = *info_.replicas();
  return {outer, shards_.layout(), shards_.row(outer)};
}

void InnerShards::issue(NoticeWords words, Layouts layouts) {
  TORCH_INTERNAL_ASSERT(are_to_be_issued());
  const auto own = pieces();
  auto issue = info_.issue(words);
  if (layouts == Layouts::kAgreed) issue.lengths = lengths_of_column();
  const auto bytes = (own.transport.shard_count() - 1) * own.layout.row_bytes();
  const ProfilerRange range("outer_all_gather", info_.name(), bytes);
  gather_.start(own, issue);
  info_.accounts().count(&Counters::outer_all_gathers);
  info_.accounts().add(&Counters::outer_all_gather_bytes, bytes);
}

// Of the rows of this rank's column: its inner shards' pieces.
std::vector<int64_t> InnerShards::lengths_of_column() const {
  const auto& all = layout_of_pieces().lengths();
  std::vector<int64_t> lengths;
  if (all.empty()) return lengths;
  const auto& grid = shards_.grid();
  for (int64_t outer = 0; outer < grid.outer_ranks; ++outer)
    lengths.push_back(all[static_cast<size_t>(grid.place_of(grid.inner_rank, outer))]);
  return lengths;
}

std::vector<NoticeWords> InnerShards::wait() {
  if (!gather_.exists()) return {};
  auto rows = gather_.wait();
  row_.refill();
  unpack(rows);
  row_.filled();
  gather_.rows_were_read(row_.when_filled());
  auto words = rows.words();
  rows = {};
  gather_.release();
  if (staging_) staging_->free();
  return words;
}

void InnerShards::unpack(const GatheredRows& rows) {
  const auto& grid = shards_.grid();
  const auto& pieces = layout_of_pieces();
  auto* const shards = static_cast<char*>(row_.bytes().mutable_data_ptr());
  for (int64_t outer = 0; outer < grid.outer_ranks; ++outer) {
    const auto place = grid.place_of(grid.inner_rank, outer);
    for (int64_t index = 0; index < layout().size(); ++index) {
      const auto& piece = pieces.chunk(index);
      const auto& shard = layout().chunk(index);
      unpack_part(shards + shard.offset_on(grid.inner_rank),
                  rows.row(outer) + piece.offset_on(place),
                  place_within({piece, place}, {shard, grid.inner_rank}), row_.bytes().device());
    }
  }
}

}  // namespace fsdp::internal
