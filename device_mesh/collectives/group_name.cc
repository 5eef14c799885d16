#include "device_mesh/collectives/group_name.h"

#include "device_mesh/collectives/ranks_in_job.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// What PrefixStore tells its heirs only.
struct Prefixed : c10d::PrefixStore {
  static const std::string& prefix_of(const c10d::PrefixStore& store) {
    return store.*(&Prefixed::prefix_);
  }
};

// The factory's name for a world, behind which an instance number follows.
bool is_world(const std::string& prefix) { return prefix.starts_with("world/"); }

}  // namespace

std::optional<GroupName> name_in_job(const Group& group) {
  auto store = group->getStore();
  std::vector<std::string> prefixes;
  while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    prefixes.push_back(Prefixed::prefix_of(*prefixed));
    store = prefixed->getUnderlyingStore();
  }
  std::reverse(prefixes.begin(), prefixes.end());
  const auto world = std::find_if(prefixes.begin(), prefixes.end(), is_world);
  if (!store || world == prefixes.end()) return std::nullopt;
  GroupName name{.store = std::move(store)};
  for (auto prefix = prefixes.begin(); prefix != prefixes.end(); ++prefix) {
    name.group += *prefix + "/";
    if (prefix <= world) name.job += *prefix + "/";
  }
  name.group += "of " + rank_list(ranks_in_job(group));
  return name;
}

}  // namespace fsdp::internal
