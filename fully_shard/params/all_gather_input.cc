#include "fully_shard/params/all_gather_input.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

AllGatherInput::AllGatherInput(const std::vector<FSDPParam>& params, Transport& transport,
                               GroupAccounts accounts)
    : transport_(transport),
      layout_(member_extents_of(params), transport.shard_count()),
      accounts_(std::move(accounts)) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !transport.one_sided(),
      "mp_policy.param_dtype and offload_policy.offload_to_cpu: not implemented "
      "on a one-sided transport");
}

PackedRow AllGatherInput::stage(const ShardBuffer& shards, const std::vector<FSDPParam>& params,
                                c10::Device device) {
  drop();
  bytes_ = transport_.shard_memory(layout_.row_bytes(), device);
  accounts_.add(&Counters::staging_bytes, bytes_.numel());
  for (int64_t index = 0; index < layout_.size(); ++index) {
    const auto& param = params[static_cast<size_t>(index)];
    const auto& chunk = layout_.chunk(index);
    bytes_.narrow(0, chunk.offset, chunk.length(transport_.shard_rank()))
        .view(param.meta().member_dtype())
        .copy_(shards.elements(index, param));
  }
  return {transport_, layout_, bytes_};
}

void AllGatherInput::drop() {
  if (!bytes_.defined()) return;
  accounts_.add(&Counters::staging_bytes, -bytes_.numel());
  bytes_.reset();
}

}  // namespace fsdp::internal
