#include "fully_shard/step/schedule.h"

#include "fully_shard/params/param_group.h"

#include <algorithm>

namespace fsdp::internal {

Schedule::Kind Schedule::kind_of(Pass pass) {
  if (in_backward(pass)) return Kind::kBackward;
  return pass == Pass::kTraining ? Kind::kTraining : Kind::kInference;
}

void Schedule::add(ParamGroup& group) { groups_.push_back(&group); }

void Schedule::remove(ParamGroup& group) {
  std::erase(groups_, &group);
  std::erase_if(successors_, [&group](const auto& item) {
    const auto& [kind, previous, current] = item.first;
    return previous == &group || current == &group || item.second == &group;
  });
  if (current_ == &group) current_ = nullptr;
  if (previous_ == &group) previous_ = nullptr;
  if (first_ == &group) first_ = nullptr;
}

bool Schedule::may_leave(const ParamGroup& group, const ParamGroup& entered,
                         bool inference_ended) const {
  if (&group == &entered || !group.unsharded()) return false;
  // Kept for a backward that never came: without gradients there is none, and the next
  // training pass gathers anew.
  if (inference_ended && group.unsharded_for_inference()) return true;
  if (kind_ == Kind::kTraining && !group.reshards_after_forward()) return false;
  if (kind_ == Kind::kBackward && !group.reshards_after_backward()) return false;
  return !group.related_to(entered);
}

void Schedule::advance(ParamGroup& group, Pass pass) {
  const auto kind = kind_of(pass);
  const bool same_kind = kind == kind_ && current_ != nullptr;
  const bool inference_ended = kind_ == Kind::kInference && kind != Kind::kInference;
  if (same_kind) successors_[{kind, previous_, current_}] = &group;
  previous_ = same_kind ? current_ : nullptr;
  if (!same_kind) first_ = &group;
  current_ = &group;
  kind_ = kind;
  for (auto* other : groups_) {
    if (may_leave(*other, group, inference_ended)) other->reshard();
  }
}

ParamGroup* Schedule::expected_successor() const {
  const auto known = successors_.find({kind_, previous_, current_});
  if (known != successors_.end()) return known->second;
  if (kind_ == Kind::kBackward) return nullptr;
  const auto here = std::find(groups_.begin(), groups_.end(), current_);
  return here == groups_.end() || here + 1 == groups_.end() ? nullptr : *(here + 1);
}

void Schedule::prefetch() {
  if (current_ == nullptr) return;
  const auto explicit_groups = current_->explicit_prefetch(kind_ == Kind::kBackward);
  if (!explicit_groups.empty()) {
    for (auto* group : explicit_groups) group->issue_all_gather();
    return;
  }
  auto* next = expected_successor();
  // The first group again: a new round may begin, or not.
  if (next == nullptr || next == first_ ||
      (kind_ == Kind::kBackward && !next->prefetched_in_backward()))
    return;
  next->issue_all_gather();
}

void Schedule::end_backward() {
  for (auto* group : groups_) {
    if (group->unsharded() && group->reshards_after_backward()) group->reshard();
  }
  current_ = previous_ = first_ = nullptr;
}

void Schedule::forget() {
  successors_.clear();
  current_ = previous_ = first_ = nullptr;
}

}  // namespace fsdp::internal
