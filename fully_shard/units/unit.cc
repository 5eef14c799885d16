#include "fully_shard/units/unit.h"

#include <algorithm>

namespace fsdp::internal {

bool Unit::is_root() const {
  const auto enclosing = parent.lock();
  return !enclosing || std::all_of(enclosing->modules.begin(), enclosing->modules.end(),
                                   [](const auto& module) { return module.expired(); });
}

bool Unit::is_ancestor_of(const Unit& other) const {
  for (auto ancestor = other.parent.lock(); ancestor; ancestor = ancestor->parent.lock()) {
    if (ancestor.get() == this) return true;
  }
  return false;
}

void Unit::ignore(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) ignored_.emplace_back(tensor.getIntrusivePtr());
}

bool Unit::ignores(const at::Tensor& tensor) const {
  const bool here = std::any_of(ignored_.begin(), ignored_.end(), [&tensor](const auto& weak) {
    return !weak.expired() && weak._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  });
  if (here) return true;
  const auto enclosing = parent.lock();
  return enclosing && enclosing->ignores(tensor);
}

void for_each_unit_below(Unit& unit, const std::function<void(Unit&)>& visit) {
  visit(unit);
  for (const auto& weak : unit.children) {
    if (const auto child = weak.lock()) for_each_unit_below(*child, visit);
  }
}

}  // namespace fsdp::internal
