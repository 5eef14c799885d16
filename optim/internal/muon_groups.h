// The step of the parameter groups that have MuonOptions, for the optimizers that have
// such groups.
#pragma once

#include "optim/muon.h"

#include <cstddef>
#include <functional>
#include <vector>

namespace fsdp::internal {

// Null where the group has options of another optimizer.
const MuonOptions* muon_options(const torch::optim::OptimizerParamGroup& group);

// Gives the last of `groups`, which LibTorch's Optimizer has just made of `given`, the
// options that these have. From 2.15 on it leaves a group only options of LibTorch's own
// classes, and gives it the optimizer's defaults in the place of others.
void keep_options(std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const std::vector<torch::optim::OptimizerParamGroup>& given);
// The same of a group that was added behind them, which goes again where `check` throws.
void keep_group(std::vector<torch::optim::OptimizerParamGroup>& groups,
                const torch::optim::OptimizerParamGroup& given, const std::function<void()>& check);

// Throws as Muon's constructor does. REQUIRES: muon_options(group) is not null.
void check_muon_group(const torch::optim::OptimizerParamGroup& group, size_t number);

// What step() begins with: the loss of its closure, with gradients; undefined for none.
torch::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

using OptimizerState =
    ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// One step of those among `groups`, as Muon::step() says; the counters are of this step.
// REQUIRES: check_muon_group() of each.
void step_muon_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      OptimizerState& state, MuonCounters& counters);

}  // namespace fsdp::internal
