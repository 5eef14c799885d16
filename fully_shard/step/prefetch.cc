#include "fully_shard/step/prefetch.h"

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/runtime_mode.h"

namespace fsdp::internal {

void prefetch(Root& root, const std::vector<UnitId>& units) {
  for (const auto unit : units) {
    auto* const group = root.group_of(unit);
    if (group == nullptr) continue;
    group->issue_unshard();
    if (group->unsharded().sharded_state().is_gathering()) root.schedule().unsharded(unit);
  }
}

void put_inner_shards_together_ahead(Root& root, UnitId unit) {
  const auto& groups = root.groups();
  for (auto next = groups.upper_bound(unit); next != groups.end(); ++next) {
    auto& group = *next->second;
    if (!group.unsharded().source().inner_shards_are_stale()) continue;
    const RuntimeMode runtime_mode;
    return group.unsharded().issue_inner_shards(group.agreement().words_for_pieces());
  }
}

void prefetch_put_off(Root& root) { prefetch(root, root.schedule().take_put_off()); }

}  // namespace fsdp::internal
