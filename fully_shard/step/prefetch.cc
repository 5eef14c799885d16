#include "fully_shard/step/prefetch.h"

#include "device_mesh/debug.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/runtime_mode.h"

#include <c10/util/Exception.h>

#include <string>

namespace fsdp::internal {
namespace {

std::string name_of(const Root& root, UnitId unit) {
  const auto* const group = root.group_of(unit);
  return group == nullptr ? "a unit that died" : "'" + group->info().name() + "'";
}

}  // namespace

void prefetch(Root& root, const std::vector<UnitId>& units) {
  for (const auto unit : units) {
    auto* const group = root.group_of(unit);
    if (group == nullptr) continue;
    group->issue_unshard();
    if (group->unsharded().state().is_gathering()) root.schedule().unsharded(unit);
  }
}

void put_inner_shards_together_ahead(Root& root, UnitId unit) {
  const auto& groups = root.groups();
  for (auto next = groups.upper_bound(unit); next != groups.end(); ++next) {
    auto& group = *next->second;
    const auto* const inner_shards = group.unsharded().inner_shards();
    if (inner_shards == nullptr || !inner_shards->are_stale()) continue;
    const RuntimeMode runtime_mode;
    return group.unsharded().issue_inner_shards(group.agreement().words_for_pieces());
  }
}

void prefetch_put_off(Root& root) { prefetch(root, root.schedule().take_put_off()); }

void warn_of_order_change(Root& root, int64_t global_rank) {
  const auto change = root.schedule().take_order_change();
  if (!change || !debug_options().order_changes || !root.tell_of_order_change()) return;
  TORCH_WARN("the order of units changed: in a training forward unit ", name_of(root, change->unit),
             " was followed by ", name_of(root, change->before), " the time before and by ",
             name_of(root, change->now),
             " now. All ranks must change their order alike, or the next gather is an error (rank ",
             global_rank, "; later changes of this root are not told)");
}

}  // namespace fsdp::internal
