#include "fully_shard/units/registry_slot.h"

#include <torch/nn/module.h>

namespace fsdp::internal {
namespace {

// Module keeps its registry protected; a pointer to the inherited member may be named by
// a derived class.
struct RegistryAccess : torch::nn::Module {
  using Parameters = torch::OrderedDict<std::string, torch::Tensor>;
  static Parameters& of(torch::nn::Module& module) {
    return module.*(&RegistryAccess::parameters_);
  }
};

}  // namespace

std::vector<RegistrySlot> slots_of(torch::nn::Module& module) {
  std::vector<RegistrySlot> slots;
  for (const auto& item : RegistryAccess::of(module)) slots.push_back({&module, item.key()});
  return slots;
}

void for_each_registered(
    torch::nn::Module& module,
    c10::function_ref<void(const std::string& key, const at::Tensor& tensor)> visit) {
  for (const auto& item : RegistryAccess::of(module)) visit(item.key(), item.value());
}

const at::Tensor& registered(const RegistrySlot& slot) {
  static const at::Tensor nothing;
  const auto* found = RegistryAccess::of(*slot.module).find(slot.key);
  return found == nullptr ? nothing : *found;
}

void put(const RegistrySlot& slot, const at::Tensor& tensor) {
  RegistryAccess::of(*slot.module)[slot.key] = tensor;
}

}  // namespace fsdp::internal
