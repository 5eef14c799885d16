#include "checkpoint/optimizer/saved_groups.h"

#include <algorithm>

namespace fsdp::internal::checkpoint {

void SavedGroups::add(const std::vector<std::string>& params) {
  for (const auto& name : params) {
    auto& groups = groups_[name];
    if (groups.empty() || groups.back() != count_) groups.push_back(count_);
  }
  ++count_;
}

std::string SavedGroups::saved_name(
    const OptimizerParameter& parameter,
    const std::function<std::string(const std::string&)>& name_in_file) const {
  const auto in_file = [&](const std::string& name) {
    return name_in_file ? name_in_file(name) : name;
  };
  for (const auto& name : parameter.names) {
    if (has(in_file(name))) return in_file(name);
  }
  return in_file(parameter.name);
}

size_t SavedGroups::group_of(const std::string& saved_name, size_t turn) const {
  const auto& groups = groups_.at(saved_name);
  return groups[std::min(turn, groups.size() - 1)];
}

std::vector<std::string> SavedGroups::besides(const std::set<std::string>& used) const {
  std::vector<std::string> names;
  for (const auto& [name, groups] : groups_) {
    if (used.count(name) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace fsdp::internal::checkpoint
