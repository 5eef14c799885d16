#include "fully_shard/units/module_tree.h"

#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_table.h"

#include <c10/util/flat_hash_map.h>
#include <torch/nn/module.h>

#include <utility>

namespace fsdp::internal {
namespace {

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

}  // namespace

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

}  // namespace fsdp::internal
