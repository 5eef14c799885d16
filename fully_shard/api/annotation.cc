#include "fully_shard/annotation.h"

#include "device_mesh/module_ref.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"

#include <torch/nn/module.h>

#include <memory>
#include <unordered_map>
#include <utility>

namespace fsdp {

// Where each module of a tree is, without the modules.
class internal::ModulePaths {
 public:
  explicit ModulePaths(const ModuleTree& tree) {
    for (size_t i = 0; i < tree.size(); ++i) {
      if (tree.is_start(i)) {
        steps_.push_back({i, ""});
      } else {
        steps_.push_back({tree.parent(i), tree.key(i)});
      }
    }
  }

  std::string of(size_t place) const {
    std::vector<const std::string*> keys;
    for (; steps_[place].parent != place; place = steps_[place].parent)
      keys.push_back(&steps_[place].key);
    std::string path;
    for (; !keys.empty(); keys.pop_back()) path += (path.empty() ? "" : ".") + *keys.back();
    return path;
  }

 private:
  struct Step {
    size_t parent;  // itself for the module that was asked for
    std::string key;
  };
  std::vector<Step> steps_;
};

namespace {

using internal::ModulePaths;
using internal::ModuleTree;
using internal::Unit;
using Places = std::unordered_map<const torch::nn::Module*, size_t>;
using Units = std::vector<std::shared_ptr<Unit>>;  // by place; null for none

// Gives `unit` to the modules at and below its own, up to deeper units, that have none.
void claim(const std::shared_ptr<Unit>& unit, const Places& places, Units& units) {
  const auto modules = internal::handle_of(unit).modules();
  std::vector<torch::nn::Module*> starts;
  for (const auto& module : modules) starts.push_back(module.get());
  const ModuleTree below(starts, ModuleTree::Stop::kAtUnits);
  for (size_t i = 0; i < below.size(); ++i) {
    if (below.unit(i) && below.unit(i) != unit) continue;
    const auto place = places.find(&below.module(i));
    if (place != places.end() && !units[place->second]) units[place->second] = unit;
  }
}

bool has_own_state(torch::nn::Module& module, const std::shared_ptr<Unit>& unit) {
  bool has = false;
  for (const auto& buffer : module.buffers(/*recurse=*/false)) has |= buffer.defined();
  internal::for_each_registered(module, [&](const std::string&, const at::Tensor& tensor) {
    has |= tensor.defined() && !(unit && unit->ignores(tensor));
  });
  return has;
}

// By place: whether the module, or one below it, has buffers or parameters that are not
// ignored.
std::vector<bool> has_state(const ModuleTree& tree, const Places& places, const Units& units) {
  std::vector<std::vector<size_t>> parents(tree.size());
  std::vector<size_t> found;
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const auto& child : tree.module(i).children())
      parents[places.at(child.get())].push_back(i);
    if (has_own_state(tree.module(i), units[i])) found.push_back(i);
  }
  std::vector<bool> has(tree.size());
  while (!found.empty()) {
    const auto place = found.back();
    found.pop_back();
    if (has[place]) continue;
    has[place] = true;
    found.insert(found.end(), parents[place].begin(), parents[place].end());
  }
  return has;
}

}  // namespace

ModulePath::ModulePath(std::shared_ptr<const ModulePaths> paths, size_t place)
    : paths_(std::move(paths)), place_(place) {}

std::string ModulePath::str() const { return paths_->of(place_); }

std::vector<ModuleAnnotation> annotations(ConstModuleRef module) {
  const auto& root = internal::given_module("annotations", module);
  const ModuleTree tree({const_cast<torch::nn::Module*>(&root)});
  Places places;
  for (size_t i = 0; i < tree.size(); ++i) places.emplace(&tree.module(i), i);
  Units units(tree.size());
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree.unit(i) && !units[i]) claim(tree.unit(i), places, units);
  }
  const auto has = has_state(tree, places, units);
  const auto paths = std::make_shared<const ModulePaths>(tree);
  std::vector<ModuleAnnotation> marks;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (units[i] && has[i])
      marks.push_back({&tree.module(i), {paths, i}, internal::handle_of(units[i])});
  }
  return marks;
}

}  // namespace fsdp
