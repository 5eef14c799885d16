// An optimizer's groups of parameters: the names by which its parameters are known, and
// which groups of a saved optimizer they were in.
#pragma once

#include "checkpoint/plan/state_items.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct OptimizerParameter {
  std::string name;                // the first of those that the model has for it
  std::vector<std::string> names;  // all, the first one first: a tied parameter has several
  at::Tensor tensor;
  size_t turn = 0;  // how many earlier groups of the optimizer list it, too
};
using OptimizerGroup = std::vector<OptimizerParameter>;

// The optimizer's groups. What a group lists several times, as LibTorch's parameters()
// list a tied parameter, is there once, where it comes first. Throws ValueError, naming
// `what` and the position, for a parameter that is none of `model`'s.
std::vector<OptimizerGroup> named_groups(const torch::optim::Optimizer& optimizer,
                                         const ModelTensors& model, const std::string& what);

// The first names of a group's parameters.
std::vector<std::string> names_of(const OptimizerGroup& group);

// Which group of a saved optimizer a parameter of an optimizer here was in.
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
