#include "fully_shard/units/managed_modules.h"

#include "fully_shard/units/unit_table.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

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

class Walk {
 public:
  explicit Walk(const std::vector<at::Tensor>& ignored) {
    for (const auto& tensor : ignored) ignored_.insert(tensor.unsafeGetTensorImpl());
  }

  void visit(torch::nn::Module& module, const std::string& path, bool is_start) {
    if (!visited_.insert(&module).second) return;
    if (!is_start) {
      if (auto unit = find_unit(module)) {
        result_.units.push_back({std::move(unit), path});
        return;
      }
    }
    for (auto& item : RegistryAccess::of(module))
      add_slot(module, item.key(), join(path, item.key()), item.value());
    for (const auto& child : module.named_children())
      visit(*child.value(), join(path, child.key()), false);
  }

  ManagedModules release() { return std::move(result_); }

 private:
  static std::string join(const std::string& path, const std::string& key) {
    return path.empty() ? key : path + "." + key;
  }

  void add_slot(torch::nn::Module& module, const std::string& key, std::string path,
                const at::Tensor& tensor) {
    if (!tensor.defined() || ignored_.contains(tensor.unsafeGetTensorImpl())) return;
    const auto [found, is_new] =
        positions_.try_emplace(tensor.unsafeGetTensorImpl(), result_.params.size());
    if (is_new) result_.params.push_back({tensor, {}});
    result_.params[found->second].slots.push_back({&module, key, std::move(path)});
  }

  std::unordered_set<const c10::TensorImpl*> ignored_;
  std::unordered_set<const torch::nn::Module*> visited_;
  std::unordered_map<const c10::TensorImpl*, size_t> positions_;
  ManagedModules result_;
};

}  // namespace

ManagedModules find_managed(const std::vector<torch::nn::Module*>& modules,
                            const std::vector<at::Tensor>& ignored) {
  Walk walk(ignored);
  for (auto* module : modules) walk.visit(*module, "", true);
  return walk.release();
}

void replace_parameter(const ParamSlot& slot, const at::Tensor& entry) {
  RegistryAccess::of(*slot.module)[slot.key] = entry;
}

bool is_registered(const ParamSlot& slot, const at::Tensor& entry) {
  const auto* registered = RegistryAccess::of(*slot.module).find(slot.key);
  return registered != nullptr && registered->is_same(entry);
}

}  // namespace fsdp::internal
