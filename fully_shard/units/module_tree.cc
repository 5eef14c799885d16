#include "fully_shard/units/module_tree.h"

#include "fully_shard/units/unit.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Type.h>
#include <c10/util/flat_hash_map.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

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

// Module keeps its children private, and named_children() copies every name and handle.
// Naming a private member in an explicit instantiation is allowed, and gives us a pointer
// to it.
struct Children {
  friend constexpr auto member_of(Children);
};
template <auto Member>
struct Expose {
  friend constexpr auto member_of(Children) { return Member; }
};
template struct Expose<&torch::nn::Module::children_>;

using Modules = ska::flat_hash_set<const torch::nn::Module*>;

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

std::string module_type_name(const torch::nn::Module& module) {
  return c10::demangle(typeid(module).name());
}

bool is_container_without_forward(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

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

ModuleTree::ModuleTree(const std::vector<torch::nn::Module*>& starts, Stop stop)
    : several_starts_(starts.size() > 1) {
  const Modules entered(starts.begin(), starts.end());
  Modules visited;
  std::vector<Place> waiting;
  for (size_t i = starts.size(); i-- > 0;)
    waiting.push_back({starts[i], kNone, nullptr, i, nullptr});
  while (!waiting.empty()) {
    auto place = std::move(waiting.back());
    waiting.pop_back();
    // When taken out, not when put in: a module that waits as a later child may be met
    // before that, below an earlier one.
    if (!visited.insert(place.module).second) continue;
    place.unit = find_unit(*place.module);
    const bool stops =
        stop == Stop::kAtUnits && place.unit != nullptr && entered.count(place.module) == 0;
    places_.push_back(std::move(place));
    if (!stops) push_children(places_.size() - 1, waiting);
  }
}

void ModuleTree::push_children(size_t place, std::vector<Place>& waiting) const {
  const auto& children = places_[place].module->*member_of(Children{});
  for (size_t i = children.size(); i-- > 0;) {
    const auto& child = children[i];
    waiting.push_back({child.value().get(), place, &child.key(), places_[place].start, nullptr});
  }
}

std::string ModuleTree::path(size_t place) const {
  std::vector<const std::string*> keys;
  for (; !is_start(place); place = places_[place].parent) keys.push_back(places_[place].key);
  auto path = several_starts_ ? "[" + std::to_string(places_[place].start) + "]" : std::string();
  for (; !keys.empty(); keys.pop_back()) path += (path.empty() ? "" : ".") + *keys.back();
  return path;
}

std::string ModuleTree::path_of(size_t place, const std::string& key) const {
  const auto above = path(place);
  return above.empty() ? key : above + "." + key;
}

std::shared_ptr<Unit> ModuleTree::nearest_unit(size_t place) const {
  for (; place != kNone; place = places_[place].parent) {
    if (places_[place].unit) return places_[place].unit;
  }
  return nullptr;
}

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
