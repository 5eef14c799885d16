#include "tests/fully_shard/random_programs/program_optimizer.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace fsdp::testing {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Optimizer kind,
                                                        const std::vector<at::Tensor>& parameters) {
  namespace optim = torch::optim;
  constexpr double kLearningRate = 0.01;
  switch (kind) {
    case Optimizer::kSgd:
      return std::make_unique<optim::SGD>(parameters,
                                          optim::SGDOptions(kLearningRate).weight_decay(0.01));
    case Optimizer::kMomentum:
      return std::make_unique<optim::SGD>(
          parameters, optim::SGDOptions(kLearningRate).momentum(0.9).nesterov(true));
    case Optimizer::kAdam:
      return std::make_unique<optim::Adam>(parameters, optim::AdamOptions(kLearningRate));
    default:
      return std::make_unique<optim::AdamW>(parameters,
                                            optim::AdamWOptions(kLearningRate).amsgrad(true));
  }
}

}  // namespace fsdp::testing
