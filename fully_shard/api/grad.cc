#include "fully_shard/grad.h"

#include "fully_shard/params/registry_entry.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

namespace fsdp {
namespace {

at::Tensor in_graph(const at::Tensor& input, size_t position) {
  TORCH_CHECK_VALUE(input.defined(), "grad: inputs[", position, "] is undefined");
  const auto* entry = internal::RegistryEntry::of(input);
  if (entry == nullptr) return input;
  const auto& param = entry->group()->params()[static_cast<size_t>(entry->index())];
  TORCH_CHECK_VALUE(param.entry().is_same(input), "grad: inputs[", position, "] of shape ",
                    input.sizes(),
                    " is a view or a detached alias of the registry entry of parameter '",
                    param.name(), "'; pass the entry of module->parameters() itself");
  return entry->member();
}

}  // namespace

std::vector<at::Tensor> grad(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs,
                             const std::vector<at::Tensor>& grad_outputs,
                             std::optional<bool> retain_graph, bool create_graph,
                             bool allow_unused) {
  std::vector<at::Tensor> known;
  known.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) known.push_back(in_graph(inputs[i], i));
  return torch::autograd::grad(outputs, known, grad_outputs, retain_graph, create_graph,
                               allow_unused);
}

}  // namespace fsdp
