#include "fully_shard/units/managed_modules.h"

#include "fully_shard/units/module_tree.h"
#include "on_demand/on_demand_storage.h"

#include <torch/nn/module.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp::internal {
namespace {

class Collector {
 public:
  explicit Collector(const std::vector<at::Tensor>& ignored) {
    for (const auto& tensor : ignored) ignored_.insert(tensor.unsafeGetTensorImpl());
  }

  void add_unit(const ModuleTree& tree, size_t place) {
    auto& units = result_.units;
    const auto [position, is_new] = units_.try_emplace(tree.unit(place).get(), units.size());
    if (is_new) units.push_back({tree.unit(place), {}, tree.path(place)});
    units[position->second].paths.emplace(&tree.module(place), tree.path(place));
  }

  void add_params(const ModuleTree& tree, size_t place) {
    for (auto& slot : slots_of(tree.module(place))) {
      const auto& tensor = registered(slot);
      if (!tensor.defined() || ignored_.contains(tensor.unsafeGetTensorImpl())) continue;
      const auto [position, is_new] =
          positions_.try_emplace(tensor.unsafeGetTensorImpl(), result_.params.size());
      if (is_new) {
        const auto handles = tensor.use_count();
        result_.params.push_back({tensor, tree.path_of(place, slot.key), {}, handles});
      }
      result_.params[position->second].slots.push_back(std::move(slot));
    }
  }

  void add_buffers(const ModuleTree& tree, size_t place) {
    for (const auto& item : tree.module(place).named_buffers(/*recurse=*/false)) {
      const auto& tensor = item.value();
      if (tensor.defined() && buffers_.insert(tensor.unsafeGetTensorImpl()).second)
        result_.buffers.push_back(tensor);
    }
  }

  ManagedModules release() { return std::move(result_); }

 private:
  std::unordered_set<const c10::TensorImpl*> ignored_;
  std::unordered_map<const Unit*, size_t> units_;  // where they are in the result
  std::unordered_map<const c10::TensorImpl*, size_t> positions_;
  std::unordered_set<const c10::TensorImpl*> buffers_;
  ManagedModules result_;
};

}  // namespace

bool FoundParam::is_tied_to_a_unit() const {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* storage = OnDemandStorage::behind(tensor);
  const auto* group = storage == nullptr ? nullptr : storage->writable_group();
  return group != nullptr && group->is_member(storage->index(), impl);
}

ManagedModules find_managed(const std::vector<torch::nn::Module*>& modules,
                            const std::vector<at::Tensor>& ignored) {
  const ModuleTree tree(modules, ModuleTree::Stop::kAtUnits);
  Collector collector(ignored);
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree.unit(i) && !tree.is_start(i)) {
      collector.add_unit(tree, i);
    } else {
      collector.add_params(tree, i);
      collector.add_buffers(tree, i);
    }
  }
  return collector.release();
}

}  // namespace fsdp::internal
