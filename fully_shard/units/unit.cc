#include "fully_shard/units/unit.h"

#include "fully_shard/units/root.h"

#include <algorithm>
#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<UnitId> next_id{0};

}  // namespace

Unit::Unit(UnitPolicy asked)
    : id(next_id.fetch_add(1, std::memory_order_relaxed)),
      root(std::make_shared<Root>()),
      policy(std::move(asked)) {
  root->schedule.add(id, policy);
}

Unit::~Unit() { root->schedule.remove(id); }

void Unit::adopt(const std::shared_ptr<Unit>& child, const std::shared_ptr<Unit>& parent) {
  child->parent = parent;
  parent->children.push_back(child);
  parent->root->absorb(*child->root);
  parent->root->schedule.set_parent(child->id, parent->id);
  child->join(parent->root);
}

void Unit::join(const std::shared_ptr<Root>& joined) {
  root = joined;
  for (const auto& weak : children) {
    if (const auto child = weak.lock()) child->join(joined);
  }
}

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

void Unit::cast_buffers() const {
  buffers.cast(policy.full_precision ? std::nullopt : precision.buffer_dtype);
}

void Unit::ignore(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors)
    ignored_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
}

bool Unit::ignores(const at::Tensor& tensor) const {
  if (ignored_.contains(tensor.unsafeGetTensorImpl())) return true;
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
