#include "fully_shard/params/all_gather_source.h"

namespace fsdp::internal {

bool are_staged(const std::vector<FSDPParam>& params, const ShardBuffer& shards) {
  return shards.is_offloaded() || any_is_cast(params);
}

AllGatherSource::AllGatherSource(const GroupInfo& info, const std::vector<FSDPParam>& params,
                                 const ShardBuffer& shards)
    : info_(info), params_(params), shards_(shards) {
  layouts_changed();
}

void AllGatherSource::layouts_changed() {
  inner_shards_.reset();
  auto& transport = info_.has_pieces() ? *info_.replicas() : info_.comm_context().transport();
  all_gather_input_ =
      are_staged(params_, shards_)
          ? std::make_unique<AllGatherInput>(params_, transport, shards_.grid(), info_.accounts())
          : nullptr;
  if (info_.has_pieces())
    inner_shards_ = std::make_unique<InnerShards>(info_, params_, shards_.member_device());
}

const PackedLayout& AllGatherSource::layout() const {
  return inner_shards_ ? inner_shards_->layout() : layout_of_shards();
}

const PackedLayout& AllGatherSource::layout_of_shards() const {
  return all_gather_input_ ? all_gather_input_->layout() : shards_.layout();
}

PackedRow AllGatherSource::packed_shards(Transport& transport) {
  if (all_gather_input_) return all_gather_input_->stage(shards_, params_, shards_.member_device());
  return {transport, shards_.layout(), shards_.row(transport)};
}

PackedRow AllGatherSource::row() {
  return inner_shards_ ? inner_shards_->row() : packed_shards(info_.comm_context().transport());
}

Issue AllGatherSource::issue_of(const PackedRow& row, NoticeWords words,
                                const Communicate* custom) const {
  auto issue = info_.issue(words, custom);
  if (layouts_ == Layouts::kAgreed) issue.lengths = &row.layout.lengths();
  return issue;
}

void AllGatherSource::drop_staged() {
  const bool is_of_pieces = inner_shards_ && inner_shards_->is_under_way();
  if (all_gather_input_ && !is_of_pieces) all_gather_input_->drop();
}

void AllGatherSource::issue_inner_shards(NoticeWords words) {
  const auto pieces = packed_shards(*info_.replicas());
  inner_shards_->issue(pieces, issue_of(pieces, words, nullptr));
}

std::vector<NoticeWords> AllGatherSource::wait_for_inner_shards() {
  if (!inner_shards_ || !inner_shards_->is_under_way()) return {};
  auto words = inner_shards_->wait();
  drop_staged();
  return words;
}

void AllGatherSource::inner_shards_agreed() {
  if (inner_shards_) inner_shards_->agreed();
}

void AllGatherSource::shards_change() {
  if (!inner_shards_) return;
  inner_shards_->pieces_change();
  drop_staged();
}

}  // namespace fsdp::internal
