#include "on_demand/touched_groups.h"

namespace fsdp::internal {

void TouchedGroups::touch(Touchable& group) {
  await_failed_backward(group);
  group.touch();
}

void TouchedGroups::await_failed_backwards() {
  for (auto* group : groups_) await_failed_backward(*group);
}

void TouchedGroups::await_failed_backward(Touchable& group) {
  if (auto* const failed = group.failed_backward()) await_end_unpinned(*failed);
}

void TouchedGroups::await_end_unpinned(OpenBackward& backward) {
  struct Unpinned {
    explicit Unpinned(TouchedGroups& groups) : groups(groups) {
      for (auto* each : groups.groups_) each->unpin();
    }
    ~Unpinned() {
      for (auto* each : groups.groups_) each->pin();
    }
    TouchedGroups& groups;
  };
  const Unpinned unpinned(*this);
  backward.await_end();
}

void TouchedGroups::evict_if_outermost() {
  if (OuterOperator::is_running()) return;
  for (auto* group : groups_) group->evict_and_poison();
}

int64_t& OuterOperator::depth() {
  thread_local int64_t depth = 0;
  return depth;
}

}  // namespace fsdp::internal
