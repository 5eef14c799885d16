#include "fully_shard/step/prefetch.h"

#include "fully_shard/params/fsdp_param_group.h"

namespace fsdp::internal {

void prefetch(Root& root, const std::vector<UnitId>& units) {
  for (const auto unit : units) {
    const auto found = root.groups.find(unit);
    if (found == root.groups.end()) continue;
    auto& group = *found->second;
    group.issue_unshard();
    if (group.unsharded().residency().is_gathering()) root.schedule.unsharded(unit);
  }
}

void prefetch_put_off(Root& root) { prefetch(root, root.schedule.take_put_off()); }

}  // namespace fsdp::internal
