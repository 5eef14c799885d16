// One fully_shard call: what was asked for, and where it stands among the other units.
#pragma once

#include "fully_shard/units/unit_policy.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

class ParamGroup;

class Unit {
 public:
  explicit Unit(UnitPolicy policy) : policy(std::move(policy)) {}

  std::string name;  // path from the outermost unit; "" for a root
  std::vector<std::weak_ptr<torch::nn::Module>> modules;  // what fully_shard was applied to
  std::weak_ptr<Unit> parent;  // the nearest enclosing unit; none for a root
  std::vector<std::weak_ptr<Unit>> children;
  ParamGroup* group =
      nullptr;  // owned by the parameters; null without parameters or once they died

  UnitPolicy policy;
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;

  bool is_root() const { return parent.expired(); }
  bool is_ancestor_of(const Unit& other) const;
  std::string display_name() const { return name.empty() ? "(root)" : name; }
};

}  // namespace fsdp::internal
