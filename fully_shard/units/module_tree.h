// The modules at and below some modules, as every part of fully_shard walks them: depth
// first, a module before its children, children in the order of their registration, and
// each module once, by the first path that leads to it. Not recursive, so depth costs no
// stack.
//
//   const ModuleTree tree({&model});
//   for (size_t i = 0; i < tree.size(); ++i)
//     visit(tree.module(i), tree.path(i), tree.nearest_unit(i));
//
// Local. Keeps no module alive, and is good while the modules register and drop nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

class Unit;

class ModuleTree {
 public:
  // kAtUnits: a unit below the starting modules is listed, and what is below it is not.
  enum class Stop { kNowhere, kAtUnits };
  explicit ModuleTree(const std::vector<torch::nn::Module*>& starts, Stop stop = Stop::kNowhere);

  size_t size() const { return places_.size(); }
  torch::nn::Module& module(size_t place) const { return *places_[place].module; }
  bool is_start(size_t place) const { return places_[place].parent == kNone; }
  // REQUIRES: not a start. The place of the module above, and the name it has there.
  size_t parent(size_t place) const { return places_[place].parent; }
  const std::string& key(size_t place) const { return *places_[place].key; }
  // From the starting module, which has "" where there is one, and "[i]" among several.
  std::string path(size_t place) const;
  std::string path_of(size_t place, const std::string& key) const;
  // The unit that was attached to the module itself; null for none.
  const std::shared_ptr<Unit>& unit(size_t place) const { return places_[place].unit; }
  // The unit of the module or of the nearest one above it; null outside of units.
  std::shared_ptr<Unit> nearest_unit(size_t place) const;

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Place {
    torch::nn::Module* module;
    size_t parent;           // in places_; kNone for a start
    const std::string* key;  // in the parent, who owns it; null for a start
    size_t start;            // which of the starting modules is above it
    std::shared_ptr<Unit> unit;
  };

  void push_children(size_t place, std::vector<Place>& waiting) const;

  std::vector<Place> places_;
  bool several_starts_;
};

}  // namespace fsdp::internal
