#include "fully_shard/params/inner_shards.h"

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/transport/packed_copy.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

InnerShards::InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
                         c10::Device device)
    : info_(info),
      grid_(info.grid()),
      layout_(member_extents_of(params), grid_.inner_ranks),
      bytes_(device.is_meta()
                 ? at::Tensor()
                 : info.comm_context().transport().shard_memory(layout_.row_bytes(), device)),
      gather_(info.accounts()) {
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
  gather_.drop();
}

void InnerShards::issue(const PackedRow& pieces, Issue issue) {
  TORCH_INTERNAL_ASSERT(is_stale_ && !is_under_way());
  auto& outer = *info_.replicas();
  const auto lengths = lengths_of_column(pieces.layout);
  if (issue.lengths != nullptr) issue.lengths = &lengths;
  const auto bytes = (outer.shard_count() - 1) * pieces.layout.row_bytes();
  const ProfilerRange range("outer_all_gather", info_.name(), bytes);
  const auto issuer = DeviceStream::current(pieces.bytes.device());
  gather_.issued(outer.gather(pieces.bytes, issue), issuer);
  pieces_ = &pieces.layout;
  const auto& accounts = info_.accounts();
  accounts.count(&Counters::outer_all_gathers);
  accounts.add(&Counters::outer_all_gather_bytes, bytes);
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
  auto rows = gather_.wait();
  const auto here = DeviceStream::current(bytes_.device());
  memory_.use_after_others(here, StreamWait::kFreeAfterUse);
  memory_.free();
  unpack(rows);
  memory_.ready(here);
  gather_.rows_were_read(memory_.when_ready());
  auto words = rows.words();
  rows = {};
  gather_.release();
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

PackedRow InnerShards::row() {
  memory_.use(DeviceStream::current(bytes_.device()));
  return {info_.comm_context().transport(), layout_, bytes_};
}

}  // namespace fsdp::internal
