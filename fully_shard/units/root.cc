#include "fully_shard/units/root.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {

void RawWrites::raise(int64_t global_rank) {
  if (!parameter_) return;
  const auto parameter = *std::exchange(parameter_, std::nullopt);
  TORCH_CHECK(false, "parameter '", parameter,
              "' was written through a raw pointer, or its shard through to_local(), while "
              "it was unsharded: such writes pass no operator, and the first kind is lost when the "
              "parameter is emptied. "
              "Write with operators, on the parameter under no_grad or on its registry entry, or "
              "announce it with "
              "Unsharded::mark_written() or fsdp::mark_shard_written(parameter) (rank ",
              global_rank,
              "; found by DebugOptions::write_checks, by the rank whose part was written)");
}

FSDPParamGroup* Root::group_of(UnitId unit) const {
  const auto found = groups_.find(unit);
  return found == groups_.end() ? nullptr : found->second;
}

void Root::remove_group(UnitId unit) noexcept {
  const auto found = groups_.find(unit);
  if (found == groups_.end()) return;
  if (ready_group_ == found->second) ready_group_ = nullptr;
  groups_.erase(found);
}

void Root::absorb(Root& other) {
  schedule_.absorb(std::move(other.schedule_));
  accounts_.absorb(other.accounts_);
  groups_.merge(other.groups_);
  if (other.gather_after_) gather_after_ = std::move(other.gather_after_);
}

}  // namespace fsdp::internal
