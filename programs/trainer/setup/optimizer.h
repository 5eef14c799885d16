// The optimizer of a run.
#pragma once

#include "programs/trainer/model/transformer.h"
#include "programs/trainer/setup/training_options.h"

#include <torch/optim/optimizer.h>

#include <memory>

namespace programs {

// Of what is trained: all parameters, or adapters alone. AdamW's decay is for matrices;
// biases and the weights of norms have other scales. Local.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainingOptions& options,
                                                        Transformer& model);

}  // namespace programs
