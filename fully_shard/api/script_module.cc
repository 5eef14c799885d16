#include "fully_shard/script_module.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>

namespace fsdp {
namespace {

// The registry of a TorchScript module.
class AdoptedModule : public torch::nn::Module {
 public:
  AdoptedModule(std::string name, const torch::jit::Module& script)
      : torch::nn::Module(std::move(name)) {
    for (const auto& [key, tensor] : script.named_parameters(/*recurse=*/false))
      register_parameter(key, tensor, tensor.requires_grad());
    for (const auto& [key, tensor] : script.named_buffers(/*recurse=*/false))
      register_buffer(key, tensor);
    for (const auto& [key, child] : script.named_children())
      register_module(key, std::make_shared<AdoptedModule>(key, child));
  }
};

}  // namespace

std::shared_ptr<torch::nn::Module> adopt(const torch::jit::Module& module) {
  const auto type = module.type()->name();
  const std::string name = type ? type->name() : "TorchScript module";
  auto adopted = std::make_shared<AdoptedModule>(name, module);
  TORCH_CHECK_VALUE(!adopted->parameters().empty() || !adopted->buffers().empty(), "adopt: ", name,
                    " has neither parameters nor buffers: torch::jit::freeze makes them "
                    "constants, which nothing can shard or train; adopt it before, or leave it "
                    "out");
  return adopted;
}

}  // namespace fsdp
