// Which group of a saved optimizer a parameter of an optimizer here was in.
#pragma once

#include "checkpoint/optimizer/parameter_names.h"

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class SavedGroups {
 public:
  // The next group's.
  void add(const std::vector<std::string>& params);

  // What it was saved as: the first of its names, by `name_in_file` where that is not
  // null, that a group has, else of its first name.
  std::string saved_name(const OptimizerParameter& parameter,
                         const std::function<std::string(const std::string&)>& name_in_file) const;
  bool has(const std::string& saved_name) const { return groups_.count(saved_name) != 0; }
  // A parameter in several groups, as a tied one may be, was in as many: the first one
  // here is the first one there, and so on. REQUIRES: has().
  size_t group_of(const std::string& saved_name, size_t turn) const;
  // Names of groups that `used` lacks.
  std::vector<std::string> besides(const std::set<std::string>& used) const;

 private:
  std::map<std::string, std::vector<size_t>> groups_;  // by parameter
  size_t count_ = 0;
};

}  // namespace fsdp::internal::checkpoint
