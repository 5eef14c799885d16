#include "on_demand/touched_groups.h"

namespace fsdp::internal {

void TouchedGroups::evict_if_outermost() {
  if (OuterOperator::is_running()) return;
  for (auto* group : groups_) group->evict_and_poison();
}

int64_t& OuterOperator::depth() {
  thread_local int64_t depth = 0;
  return depth;
}

}  // namespace fsdp::internal
