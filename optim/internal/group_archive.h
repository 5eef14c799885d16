// Saves and loads an optimizer whose groups have options and state of several classes,
// in the form of LibTorch's own (torch/optim/serialize.h), whose templates know one.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <memory>

namespace fsdp::internal {

void write_groups(torch::serialize::OutputArchive& archive,
                  const torch::optim::Optimizer& optimizer);

// `new_state(group)`: an empty state of the group's class; options keep theirs. State of
// parameters that the archive has none of stays. Throws c10::Error, having changed
// nothing, where groups or fields are others.
void read_groups(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer,
                 c10::function_ref<std::unique_ptr<torch::optim::OptimizerParamState>(
                     const torch::optim::OptimizerParamGroup&)>
                     new_state);

}  // namespace fsdp::internal
