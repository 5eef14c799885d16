// TorchScript modules as parts of a model, so that their parameters are sharded and
// trained like all others.
//
//   struct Classifier : torch::nn::Module {
//     Classifier() { register_module("backbone", fsdp::adopt(backbone)); }
//     torch::Tensor forward(const torch::Tensor& x) { return backbone.forward({x}).toTensor(); }
//
//     torch::jit::Module backbone = torch::jit::load("backbone.pt");
//   };
//
// A torch::jit::Module that is a plain member of a torch::nn::Module is invisible:
// parameters() does not list what it holds, and where that is trained, the ranks' copies
// drift apart. Adopted, its tensors are in the registry too, which is all that
// fully_shard needs: what TorchScript runs are operators.
#pragma once

#include "device_mesh/api.h"

#include <memory>

namespace torch::jit {
struct Module;
}
namespace torch::nn {
class Module;
}

namespace fsdp {

// A module with the parameters, buffers and submodules of `module` under their names,
// which shares every tensor with it and has no forward of its own. Move and convert the
// TorchScript module before, not after: it then has other tensors. Throws ValueError for
// one without parameters and buffers, as torch::jit::freeze leaves it. Local.
[[nodiscard]] FSDP_API std::shared_ptr<torch::nn::Module> adopt(const torch::jit::Module& module);

}  // namespace fsdp
