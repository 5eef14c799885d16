// The names by which an optimizer's parameters are known.
#pragma once

#include "checkpoint/plan/state_items.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
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

}  // namespace fsdp::internal::checkpoint
