// How a group is unsharded by hand and held, outside the schedule's turns.
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/root.h"

namespace fsdp::internal {

void ParamGroup::unshard_async() {
  if (residency().is_borrowed()) return;
  const ExclusiveUse use(dim_->user());
  empty_if_stale();
  issue_gather();
  if (!residency().is_sharded()) asked_by_hand();
}

void ParamGroup::unshard() {
  if (residency().is_borrowed()) return;
  const ExclusiveUse use(dim_->user());
  const RuntimeMode runtime_mode;
  pin();
  try {
    empty_if_stale();
    issue_gather();
    fill();
  } catch (...) {
    unpin();
    throw;
  }
  unpin();
  asked_by_hand();
}

void ParamGroup::asked_by_hand() {
  unsettle();
  unit_->root->schedule.unsharded_by_hand(unit_->id);
}

void ParamGroup::hold() {
  unshard();
  copy_.hold();
}

void ParamGroup::release() {
  copy_.release();
  if (!residency().is_held()) reshard();
}

void ParamGroup::release_own_parts() {
  copy_.release();
  if (!may_be_emptied()) return;
  write_back_own_parts();
  reshard();
}

}  // namespace fsdp::internal
