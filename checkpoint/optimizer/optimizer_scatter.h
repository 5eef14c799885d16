// Rank 0's optimizer state, sent to all ranks one tensor at a time, of which each keeps
// its part.
#pragma once

#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/ranks/world.h"

#include <string>

namespace fsdp::internal::checkpoint {

// `dict` counts on rank 0. Tensors of a parameter's shape come back distributed like it.
// Collective over `world`; throws, naming `what`, on all ranks alike.
OptimizerStateDict scatter(const torch::nn::Module& module,
                           const torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                           const World& world, const std::string& what);

}  // namespace fsdp::internal::checkpoint
