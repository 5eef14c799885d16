// A place in a module's parameter registry: what parameters() lists and optimizers see,
// reached past Module's access control, since LibTorch cannot replace a parameter.
//
//   for (const auto& slot : slots_of(module))
//     if (registered(slot).is_same(member)) put(slot, entry);
//
// Local. A slot does not keep its module alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

struct RegistrySlot {
  torch::nn::Module* module;
  std::string key;  // in the module's registry
};

// The module's own slots, in order of registration, those that hold nothing included.
std::vector<RegistrySlot> slots_of(torch::nn::Module& module);
// Calls visit(key, tensor) for each of them, in place: `visit` must not register.
void for_each_registered(
    torch::nn::Module& module,
    c10::function_ref<void(const std::string& key, const at::Tensor& tensor)> visit);
// What the slot holds, itself, not a copy of the handle; undefined when there is no such
// slot any more.
const at::Tensor& registered(const RegistrySlot& slot);
void put(const RegistrySlot& slot, const at::Tensor& tensor);

}  // namespace fsdp::internal
