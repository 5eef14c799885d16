#include "device_mesh/collectives/group.h"

#include "device_mesh/internal/weak_registry.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <numeric>
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

auto& known_ranks() {
  static auto& instance =
      *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::vector<int64_t>>();
  return instance;
}

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

void set_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::vector<int64_t> ranks) {
  known_ranks().with(group, [&](std::vector<int64_t>& known) { known = std::move(ranks); });
}

void note_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<int64_t> ranks) {
  known_ranks().with(group, [&](std::vector<int64_t>& known) {
    if (known.empty()) known = std::move(ranks);
  });
}

std::vector<int64_t> ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (auto known = known_ranks().find(group)) return *std::move(known);
  std::vector<int64_t> own(static_cast<size_t>(group->getSize()));
  std::iota(own.begin(), own.end(), int64_t{0});
  return own;
}

std::string rank_list(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const auto rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

using c10d::ProcessGroup;

int64_t group_rank(const Group& group) { return group->getRank(); }
int64_t group_size(const Group& group) { return group->getSize(); }

std::string group_backend(const Group& group) {
  if (group->getBackendType() != ProcessGroup::CUSTOM) return group->getBackendName();
  return group->getDefaultBackend()->getBackendName();
}

bool serves(const Group& group, c10::DeviceType device_type) {
  const auto served = group->getDeviceTypes();
  return std::any_of(served.begin(), served.end(),
                     [&](const c10::Device& device) { return device.type() == device_type; });
}

bool has_gloo(const Group& group) {
  const auto type = group->getBackendType();
  if (type == ProcessGroup::GLOO || type == ProcessGroup::NCCL) return true;
  return serves(group, c10::kCPU) && group->getBackend(c10::kCPU)->getBackendName() == "gloo";
}

}  // namespace fsdp::internal
