#include "checkpoint/internal/parameter_names.h"

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

namespace fsdp::internal::checkpoint {

std::vector<std::vector<std::string>> names_of_groups(const torch::optim::Optimizer& optimizer,
                                                      const ModelTensors& model,
                                                      const std::string& what) {
  std::map<const void*, std::string> names;
  for (const auto& [name, tensor, unit] : model.tensors) {
    names.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  std::vector<std::vector<std::string>> groups;
  for (const auto& group : optimizer.param_groups()) {
    auto& of_group = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != names.end(), what, ": parameter ", of_group.size(), " of group ",
                        groups.size() - 1, ", of shape ", parameter.sizes(),
                        ", is no parameter of the model, so it has no name to be saved by. Make ",
                        "the optimizer after fully_shard, over model->parameters()");
      of_group.push_back(found->second);
    }
  }
  return groups;
}

}  // namespace fsdp::internal::checkpoint
