// The names by which an optimizer's parameters are known.
#pragma once

#include "checkpoint/internal/state_items.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// One list per group. Throws ValueError, naming `what` and the position, for a parameter
// that is none of `model`'s.
std::vector<std::vector<std::string>> names_of_groups(const torch::optim::Optimizer& optimizer,
                                                      const ModelTensors& model,
                                                      const std::string& what);

}  // namespace fsdp::internal::checkpoint
