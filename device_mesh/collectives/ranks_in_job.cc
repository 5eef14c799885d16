#include "device_mesh/collectives/ranks_in_job.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <mutex>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

struct KnownGroup {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::vector<int64_t> ranks;
};

struct KnownRanks {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, KnownGroup> groups;
};

KnownRanks& known_ranks() {
  static auto& instance =
      *new KnownRanks();  // leaked: groups may die after static destruction began
  return instance;
}

}  // namespace

void set_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::vector<int64_t> ranks) {
  std::lock_guard lock(known_ranks().mutex);
  auto& groups = known_ranks().groups;
  std::erase_if(groups, [](const auto& item) { return item.second.group.expired(); });
  groups.insert_or_assign(
      group.get(),
      KnownGroup{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), std::move(ranks)});
}

void note_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<int64_t> ranks) {
  {
    std::lock_guard lock(known_ranks().mutex);
    const auto known = known_ranks().groups.find(group.get());
    if (known != known_ranks().groups.end() && !known->second.group.expired()) return;
  }
  set_ranks_in_job(group, std::move(ranks));
}

std::vector<int64_t> ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  {
    std::lock_guard lock(known_ranks().mutex);
    const auto found = known_ranks().groups.find(group.get());
    if (found != known_ranks().groups.end()) return found->second.ranks;
  }
  std::vector<int64_t> own(static_cast<size_t>(group->getSize()));
  std::iota(own.begin(), own.end(), int64_t{0});
  return own;
}

std::string rank_list(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const auto rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace fsdp::internal
