#include "fully_shard/params/cast_row.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

CastRow::CastRow(const std::vector<ShardedParam>& params, Transport& transport,
                 GroupAccounts accounts)
    : transport_(transport),
      layout_(member_extents_of(params), transport.shard_count()),
      accounts_(std::move(accounts)) {
  TORCH_CHECK_NOT_IMPLEMENTED(!transport.one_sided(),
                              "mp_policy.param_dtype: not implemented on a one-sided transport");
}

PackedRow CastRow::cast(const ShardBuffer& shards, const std::vector<ShardedParam>& params) {
  drop();
  bytes_ = transport_.shard_memory(layout_.row_bytes(), shards.device());
  accounts_.add(&Counters::staging_bytes, bytes_.numel());
  for (int64_t index = 0; index < layout_.size(); ++index) {
    const auto& param = params[static_cast<size_t>(index)];
    const auto& chunk = layout_.chunk(index);
    bytes_.narrow(0, chunk.offset, chunk.length(transport_.shard_rank()))
        .view(param.member_dtype())
        .copy_(shards.elements(index, param));
  }
  return {transport_, layout_, bytes_};
}

void CastRow::drop() {
  if (!bytes_.defined()) return;
  accounts_.add(&Counters::staging_bytes, -bytes_.numel());
  bytes_.reset();
}

}  // namespace fsdp::internal
