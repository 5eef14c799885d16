#include "fully_shard/step/prefetch.h"

#include "fully_shard/params/fsdp_param_group.h"

namespace fsdp::internal {

void prefetch(Root& root, const std::vector<UnitId>& units) {
  for (const auto unit : units) {
    auto* const group = root.group_of(unit);
    if (group == nullptr) continue;
    group->issue_unshard();
    if (group->unsharded().sharded_state().is_gathering()) root.schedule().unsharded(unit);
  }
}

void prefetch_put_off(Root& root) { prefetch(root, root.schedule().take_put_off()); }

}  // namespace fsdp::internal
