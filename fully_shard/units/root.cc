#include "fully_shard/units/root.h"

namespace fsdp::internal {

FSDPParamGroup* Root::group_of(UnitId unit) const {
  const auto found = groups_.find(unit);
  return found == groups_.end() ? nullptr : found->second;
}

void Root::remove_group(UnitId unit) noexcept {
  const auto found = groups_.find(unit);
  if (found == groups_.end()) return;
  if (settled_ == found->second) settled_ = nullptr;
  groups_.erase(found);
}

void Root::absorb(Root& other) {
  schedule_.absorb(std::move(other.schedule_));
  accounts_.absorb(other.accounts_);
  groups_.merge(other.groups_);
  if (other.gather_after_) gather_after_ = std::move(other.gather_after_);
}

}  // namespace fsdp::internal
