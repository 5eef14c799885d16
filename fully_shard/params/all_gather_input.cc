#include "fully_shard/params/all_gather_input.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {

AllGatherInput::AllGatherInput(const std::vector<FSDPParam>& params, Transport& transport,
                               const ShardGrid& grid, GroupAccounts accounts)
    : transport_(transport),
      grid_(grid),
      layout_(cut_over(member_extents_of(params), grid), grid.count()),
      accounts_(std::move(accounts)) {}

PackedRow AllGatherInput::stage(const ShardBuffer& shards, const std::vector<FSDPParam>& params,
                                c10::Device device) {
  drop();
  bytes_ = transport_.staging_memory(layout_.row_bytes(), device);
  accounts_.add(&Counters::staging_bytes, bytes_.numel());
  if (device.is_cpu()) {
    copy_each(shards, params);
  } else {
    copy_at_once(shards, params);
  }
  return {transport_, layout_, bytes_};
}

void AllGatherInput::copy_each(const ShardBuffer& shards, const std::vector<FSDPParam>& params) {
  for (int64_t index = 0; index < layout_.size(); ++index) {
    const auto& param = params[static_cast<size_t>(index)];
    place_of(index, param).copy_(shards.elements(index, param));
  }
}

// All of a row in one launch: to another dtype; or from host memory, in which it is one
// piece; or both, in one launch each.
void AllGatherInput::copy_at_once(const ShardBuffer& shards, const std::vector<FSDPParam>& params) {
  const bool is_cast = any_is_cast(params);
  auto source = shards.bytes();
  if (shards.is_offloaded()) {
    source = is_cast ? at::empty_like(source, bytes_.options()) : bytes_;
    shards.copy_to(source);
  }
  if (!is_cast) return;
  std::vector<at::Tensor> from, to;
  for (int64_t index = 0; index < layout_.size(); ++index) {
    const auto& param = params[static_cast<size_t>(index)];
    from.push_back(shards.elements_in(source, index, param));
    to.push_back(place_of(index, param));
  }
  at::_foreach_copy_(to, from);
}

at::Tensor AllGatherInput::place_of(int64_t index, const FSDPParam& param) const {
  const auto& chunk = layout_.chunk(index);
  const auto place = grid_.place();
  return bytes_.narrow(0, chunk.offset_on(place), chunk.length(place))
      .view(param.meta().member_dtype());
}

void AllGatherInput::drop() {
  if (!bytes_.defined()) return;
  accounts_.add(&Counters::staging_bytes, -bytes_.numel());
  bytes_.reset();
}

}  // namespace fsdp::internal
