#include "fully_shard/units/unit.h"

#include "fully_shard/transport/transport.h"
#include "fully_shard/units/root.h"

#include <algorithm>
#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<UnitId> next_id{0};

}  // namespace

Unit::Unit(UnitPolicy asked)
    : id(next_id.fetch_add(1, std::memory_order_relaxed)),
      policy(std::move(asked)),
      root_(std::make_shared<Root>()) {
  root_->schedule().add(id, policy);
}

Unit::~Unit() { root_->schedule().remove(id); }

const std::string& Unit::display_name() const {
  static const std::string root = kRootName;
  return name.empty() ? root : name;
}

void Unit::adopt(const std::shared_ptr<Unit>& child, const std::shared_ptr<Unit>& parent) {
  child->parent_ = parent;
  parent->children_.push_back(child);
  parent->root_->absorb(*child->root_);
  parent->root_->schedule().set_parent(child->id, parent->id);
  child->join(parent->root_);
}

void Unit::join(const std::shared_ptr<Root>& joined) {
  root_ = joined;
  for (const auto& child : children()) child->join(joined);
}

std::vector<std::shared_ptr<Unit>> Unit::children() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const auto& weak : children_) {
    if (auto child = weak.lock()) alive.push_back(std::move(child));
  }
  return alive;
}

void Unit::add_module(std::weak_ptr<torch::nn::Module> module) {
  modules_.push_back(std::move(module));
}

void Unit::attach(FSDPParamGroup& group) {
  group_ = &group;
  root_->add_group(id, group);
}

void Unit::detach_group() noexcept {
  group_ = nullptr;
  root_->remove_group(id);
}

bool Unit::is_root() const {
  const auto enclosing = parent();
  return !enclosing || std::all_of(enclosing->modules().begin(), enclosing->modules().end(),
                                   [](const auto& module) { return module.expired(); });
}

bool Unit::is_ancestor_of(const Unit& other) const {
  for (auto ancestor = other.parent(); ancestor; ancestor = ancestor->parent()) {
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
  const auto enclosing = parent();
  return enclosing && enclosing->ignores(tensor);
}

void for_each_unit_below(Unit& unit, const std::function<void(Unit&)>& visit) {
  visit(unit);
  for (const auto& child : unit.children()) for_each_unit_below(*child, visit);
}

}  // namespace fsdp::internal
