#include "fully_shard/units/unit.h"

#include "device_mesh/internal/weak_registry.h"
#include "dtensor/dtensor.h"
#include "fully_shard/transport/transport.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Of a buffer that some unit casts. It has its own dtype again whenever it has another
// one than `cast` (Module::to).
struct DtypesOfBuffer {
  at::ScalarType own = at::ScalarType::Undefined, cast = own;
};

// Of the buffers of all units of the process.
auto& dtypes_of_buffers() {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static auto& instance = *new WeakKeyMap<WeakTensor, DtypesOfBuffer>();
  return instance;
}

void cast_buffer(const at::Tensor& buffer, std::optional<at::ScalarType> dtype) {
  if (buffer.is_meta()) return;
  const auto own = own_dtype(buffer);
  const auto becomes = dtype.value_or(own);
  if (buffer.scalar_type() != becomes) buffer.set_data(buffer.to(becomes));
  dtypes_of_buffers().with(buffer.getIntrusivePtr(), [&](DtypesOfBuffer& dtypes) {
    dtypes = {own, becomes};
  });
}

std::atomic<UnitId> next_id{0};

// A unit is let go by the thread that attached it: ranks may be threads, and another one
// may be using the unit's root.
struct Attached {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<Unit> unit;
  std::thread::id thread;

  bool may_go() const { return module.expired() && thread == std::this_thread::get_id(); }
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, Attached> units;

  std::vector<Attached> displaced;  // by modules at the addresses of dead ones

  void sweep() {
    std::erase_if(units, [](const auto& item) { return item.second.may_go(); });
    std::erase_if(displaced, [](const auto& attached) { return attached.may_go(); });
  }
};

Table& table() {
  static auto& instance = *new Table();  // leaked: modules may die after static destruction began
  return instance;
}

}  // namespace

at::ScalarType own_dtype(const at::Tensor& tensor) {
  const auto known = dtypes_of_buffers().find(tensor.getIntrusivePtr());
  return known && known->cast == tensor.scalar_type() ? known->own : tensor.scalar_type();
}

at::Tensor in_own_dtype(const at::Tensor& tensor) {
  const auto dtype = own_dtype(tensor);
  return tensor.scalar_type() == dtype ? tensor : tensor.detach().to(dtype);
}

void UnitBuffers::take(const std::vector<at::Tensor>& buffers) {
  for (const auto& buffer : buffers) {
    const auto dtype = buffer.scalar_type();
    if (!at::isFloatingType(dtype) || is_dtensor(buffer)) continue;
    dtypes_of_buffers().with(buffer.getIntrusivePtr(), [&](DtypesOfBuffer& dtypes) {
      if (dtypes.own != at::ScalarType::Undefined) return;  // a unit has it
      dtypes = {dtype, dtype};
      buffers_.emplace_back(buffer.getIntrusivePtr());
    });
  }
}

void UnitBuffers::cast(std::optional<at::ScalarType> dtype) const {
  const at::NoGradGuard no_grad;
  for (const auto& weak : buffers_) {
    const at::Tensor buffer(weak.lock());
    if (buffer.defined()) cast_buffer(buffer, dtype);
  }
}

void RawWrites::raise(int64_t global_rank) {
  if (!parameter_) return;
  const auto parameter = *std::exchange(parameter_, std::nullopt);
  TORCH_CHECK(false, "parameter '", parameter,
              "' was written through a raw pointer, or its shard through to_local(), while "
              "it was unsharded: such writes pass no operator, and the first kind is lost when the "
              "parameter is emptied. "
              "Write with operators, on the parameter under no_grad or on its registry entry, or "
              "announce it with "
              "Unsharded::mark_written() or fsdp::mark_shard_written(parameter) (rank ",
              global_rank,
              "; found by DebugOptions::write_checks, by the rank whose part was written)");
}

FSDPParamGroup* Root::group_of(UnitId unit) const {
  const auto found = groups_.find(unit);
  return found == groups_.end() ? nullptr : found->second;
}

void Root::remove_group(UnitId unit) noexcept {
  const auto found = groups_.find(unit);
  if (found == groups_.end()) return;
  if (ready_group_ == found->second) ready_group_ = nullptr;
  groups_.erase(found);
}

void Root::absorb(Root& other) {
  schedule_.absorb(std::move(other.schedule_));
  accounts_.absorb(other.accounts_);
  groups_.merge(other.groups_);
  if (other.gather_after_) gather_after_ = std::move(other.gather_after_);
}

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

std::shared_ptr<Unit> find_unit(const torch::nn::Module& module) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().units.find(&module);
  if (found == table().units.end() || found->second.module.expired()) return nullptr;
  return found->second.unit;
}

void attach_unit(torch::nn::Module& module, std::shared_ptr<Unit> unit) {
  const std::lock_guard lock(table().mutex);
  table().sweep();
  unit->add_module(module.weak_from_this());
  auto& place = table().units[&module];
  if (place.unit && place.module.expired()) table().displaced.push_back(std::move(place));
  place = {module.weak_from_this(), std::move(unit), std::this_thread::get_id()};
}

}  // namespace fsdp::internal
