#define XXH_INLINE_ALL
#include "device_mesh/process_groups/dimension_groups.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/process_groups/process_group_factory.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <xxhash.h>

#include <numeric>
#include <utility>

namespace fsdp::internal {

DimensionGroups::DimensionGroups(Group group) : group_(std::move(group)) {}
DimensionGroups::~DimensionGroups() = default;

void DimensionGroups::announce(const std::string& what) const {
  IssueLog::of(group_, c10::kCPU)
      ->announce({.kind = CollectiveKind::kAllReduce,
                  .unit = XXH32(what.data(), what.size(), 0),
                  .what = what})
      .wait();
}

DimensionGroups::Group DimensionGroups::side_group(const std::string& purpose) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = side_groups_.find(purpose);
  if (known != side_groups_.end()) return known->second;
  announce("making of the group for " + purpose);
  std::vector<int64_t> everyone(static_cast<size_t>(group_->getSize()));
  std::iota(everyone.begin(), everyone.end(), int64_t{0});
  auto side = make_subgroup(group_, everyone, group_->getGroupDesc() + "/" + purpose);
  return side_groups_[purpose] = std::move(side);
}

std::shared_ptr<DimensionGroups> DimensionGroups::make_subset(
    const std::vector<int64_t>& group_ranks, const std::string& purpose) {
  auto subset = std::make_shared<DimensionGroups>(make_subgroup(group_, group_ranks, purpose));
  const std::lock_guard<std::mutex> lock(mutex_);
  subsets_.push_back(subset);
  return subset;
}

std::shared_ptr<const void> DimensionGroups::held_mesh() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return mesh_.lock();
}

void DimensionGroups::remember_mesh(std::weak_ptr<const void> mesh) {
  const std::lock_guard<std::mutex> lock(mutex_);
  mesh_ = std::move(mesh);
}

void DimensionGroups::before_shut_down(const std::string& purpose, std::function<void()> finish) {
  const std::lock_guard<std::mutex> lock(mutex_);
  finishes_[purpose] = std::move(finish);
}

std::exception_ptr DimensionGroups::finish() {
  std::exception_ptr error;
  for (const auto& [purpose, finish] : std::exchange(finishes_, {})) {
    try {
      finish();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  return error;
}

void DimensionGroups::shut_down() {
  const std::exception_ptr error = finish();  // it may need the lock for groups
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& weak : subsets_) {
      if (auto subset = weak.lock()) subset->shut_down();
    }
    for (auto& [purpose, side] : side_groups_) internal::shut_down(side);
    side_groups_.clear();
    IssueLog::end(group_);
    internal::shut_down(group_);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace fsdp::internal
