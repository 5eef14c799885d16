// The optimizer of a random program, for either side.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

namespace fsdp::testing {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Optimizer kind,
                                                        const std::vector<at::Tensor>& parameters);

}  // namespace fsdp::testing
