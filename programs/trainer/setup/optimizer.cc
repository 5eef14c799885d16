#include "programs/trainer/setup/optimizer.h"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

namespace programs {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainingOptions& options,
                                                        Transformer& model) {
  auto trained = model->parameters();
  std::erase_if(trained, [](const auto& parameter) { return !parameter.requires_grad(); });
  if (options.optimizer == OptimizerKind::kSgd)
    return std::make_unique<torch::optim::SGD>(trained, torch::optim::SGDOptions(options.lr));
  std::vector<torch::Tensor> matrices, others;
  for (const auto& parameter : trained)
    (parameter.dim() > 1 ? matrices : others).push_back(parameter);
  const auto group = [&](const std::vector<torch::Tensor>& parameters, double weight_decay) {
    return torch::optim::OptimizerParamGroup(
        parameters, std::make_unique<torch::optim::AdamWOptions>(
                        torch::optim::AdamWOptions(options.lr).weight_decay(weight_decay)));
  };
  return std::make_unique<torch::optim::AdamW>(
      std::vector<torch::optim::OptimizerParamGroup>{group(matrices, options.weight_decay),
                                                     group(others, 0)},
      torch::optim::AdamWOptions(options.lr));
}

}  // namespace programs
