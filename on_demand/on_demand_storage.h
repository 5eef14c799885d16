// Storage that is empty until an operator touches it, as the gate (on_demand/gate.h) sees
// it. fully_shard/ implements the group that fills and empties it.
//
// The StorageImpl object lives as long as its tensors; filling and emptying change its
// bytes only, so saved views stay valid. While empty it keeps its logical size, and raw
// access throws a message that names the parameter.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <typeinfo>

namespace c10 {
struct TensorImpl;
}

namespace fsdp::internal {

class OnDemandStorage;

// Storages that are made readable together, and what the gate tells them of operators:
// that they are about to use them. fully_shard/ implements it:
//
//   void touch() override { gather(); mark_ready(current_pass()); }   // until something changes:
//   void reshard() { clear_ready(); free(); }
//
// One thread at a time drives it.
class Touchable : public c10::intrusive_ptr_target {
 public:
  // Makes the storages readable, for the calling thread's stream, or throws. May be
  // collective. Not called while ready.
  virtual void touch() = 0;
  virtual const std::string& parameter_name(int64_t index) const = 0;
  // `storage` belonged to this, and may be followed by another one by now.
  virtual void storage_destroyed(int64_t /*index*/, const OnDemandStorage* /*storage*/) noexcept {}
  // Test mode: empties what there is to empty, and poisons its bytes, unless pinned.
  virtual void evict_and_poison() {}

  // Until clear_ready(), or mark_ready() of another pass, a touch in `pass` would do
  // nothing, and is left out. REQUIRES: the storages are readable.
  void mark_ready(Pass pass) { ready_for_.store(mark_of(pass), std::memory_order_release); }
  void clear_ready() { ready_for_.store(kNotReady, std::memory_order_release); }
  bool is_ready(Pass pass) const {
    return ready_for_.load(std::memory_order_acquire) == mark_of(pass);
  }
  // The same on a device, where the calling thread's stream may be another one each time:
  // touch() is still called, and only orders that stream.
  void mark_ready_but_for_stream(Pass pass) {
    ready_for_.store(mark_of(pass) | kStreamMatters, std::memory_order_release);
  }
  bool is_ready_but_for_stream(Pass pass) const {
    return ready_for_.load(std::memory_order_acquire) == (mark_of(pass) | kStreamMatters);
  }

  // A failed backward that another thread is still cleaning up after. That empties what
  // is not pinned, so wait for it before you pin or look. Null for none, and on the CPU.
  OpenBackward* failed_backward() const {
    return backward_ != nullptr && backward_->has_failed() ? backward_ : nullptr;
  }
  // For those who look at it without a touch. Waits for that end.
  void await_failed_backward() const {
    if (auto* const failed = failed_backward()) failed->await_end();
  }

  // A pinned group is not emptied.
  void pin() { pins_.fetch_add(1, std::memory_order_relaxed); }
  void unpin() { pins_.fetch_sub(1, std::memory_order_relaxed); }
  bool pinned() const { return pins_.load(std::memory_order_relaxed) != 0; }

 protected:
  // `backward`: which uses this; outlives it. Null where it ends on the caller's thread.
  explicit Touchable(OpenBackward* backward = nullptr) : backward_(backward) {}

 private:
  static constexpr uint8_t kNotReady = 0;
  static constexpr uint8_t kStreamMatters = 0x80;
  static constexpr uint8_t mark_of(Pass pass) { return static_cast<uint8_t>(pass) + 1; }

  std::atomic<int64_t> pins_{0};
  std::atomic<uint8_t> ready_for_{kNotReady};
  OpenBackward* backward_;
};

// The parameters that are filled and emptied together, and that operators may write.
class OnDemandGroup : public Touchable {
 public:
  explicit OnDemandGroup(OpenBackward* backward = nullptr) : Touchable(backward) {}
  // Brings what autograd reads of parameter `index` (requires_grad) up to date, if `impl`
  // is the parameter itself. Left out where the storage sees that nothing changed
  // (OnDemandStorage::watch_requires_grad).
  virtual void synchronize_metadata(int64_t index, c10::TensorImpl* impl) = 0;
  // An operator is about to write parameter `index` in place, and the group is readable.
  virtual void member_written(int64_t index) = 0;
  // Whether `impl` is parameter `index` itself, not a view of it.
  virtual bool is_member(int64_t index, const c10::TensorImpl* impl) const = 0;
  // The plain tensor that this rank brings to the reduction of parameter `index`, or a
  // view of it, for a gradient that came as the DTensor `gradient`. Collective where it
  // has to move.
  virtual at::Tensor gradient_share(int64_t index, const at::Tensor& gradient) const = 0;
  // An operator is about to write parameter `index`; the group may still be sharded.
  virtual void before_member_write(int64_t /*index*/) {}
};

class OnDemandStorage final : public c10::StorageImpl {
 public:
  // Of parameter `index` of `group`. Starts empty.
  OnDemandStorage(c10::intrusive_ptr<OnDemandGroup> group, int64_t index, int64_t nbytes,
                  c10::Device device);
  // Of what can be touched, and has no parameter to write. Starts empty.
  OnDemandStorage(c10::intrusive_ptr<Touchable> group, int64_t nbytes, c10::Device device);
  ~OnDemandStorage() override;

  // The on-demand storage behind `impl`, or null. Checks the storage's type, since set_()
  // keeps keys.
  static OnDemandStorage* of(const c10::TensorImpl* impl) {
    if (!impl->has_storage()) return nullptr;
    auto* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
    return storage != nullptr && typeid(*storage) == typeid(OnDemandStorage)
               ? static_cast<OnDemandStorage*>(storage)
               : nullptr;
  }

  // The same of what this rank holds of `tensor`: a tensor-parallel member is a DTensor
  // over one. Null for registry entries.
  static OnDemandStorage* behind(const at::Tensor& tensor) {
    return of(held_part(tensor).unsafeGetTensorImpl());
  }

  Touchable& group() const { return *group_; }
  // The same, or null where there is nothing to write.
  OnDemandGroup* writable_group() const { return writable_; }
  int64_t index() const { return index_; }
  const std::string& parameter_name() const { return group_->parameter_name(index_); }

  // From now on `member` requires grad when `entry` does, and the group is asked to
  // synchronise only when one of the two changed: a touch reads two flags. The group
  // calls it once, when it gave `member` this storage. Without it, or after `entry` died,
  // the group is always asked. Keeps neither alive.
  void watch_requires_grad(const at::Tensor& member, const at::Tensor& entry);
  // Brings requires_grad of `impl`, whose storage this is, up to date.
  void synchronize_metadata(c10::TensorImpl* impl) {
    if (writable_ == nullptr || is_up_to_date(impl)) return;
    writable_->synchronize_metadata(index_, impl);
    if (watched_.has_value()) watched_->seen = impl->requires_grad();
  }

  // Operators that meet the parameter compute with its dtype: the gate casts their other
  // floating inputs.
  void cast_inputs() { casts_inputs_ = true; }
  bool casts_inputs() const { return casts_inputs_; }

  // `data` stays owned by the caller, who keeps it alive until empty().
  void fill(void* data);
  void empty();
  // The parameter has another name from now on, which the error of raw access is to tell.
  void renamed();

 private:
  // Weak references keep the addresses from being used again. A dead tensor requires no
  // grad.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Watched {
    WeakTensor member, entry;
    bool seen;  // what both said when the group was last asked
  };

  bool is_up_to_date(const c10::TensorImpl* impl) const {
    return watched_.has_value() &&
           (impl != watched_->member._unsafe_get_target() ||
            (impl->requires_grad() == watched_->seen &&
             watched_->entry._unsafe_get_target()->requires_grad() == watched_->seen));
  }

  c10::intrusive_ptr<Touchable> group_;
  OnDemandGroup* writable_;  // group_, or null
  int64_t index_;
  std::optional<Watched> watched_;
  bool casts_inputs_ = false;
};

// Test mode, process-wide: after every outermost operator that touched a group, empty and
// poison it. With it a result can not depend on a group being unsharded by luck.
void set_evict_after_every_operator(bool enabled);
bool evict_after_every_operator();

// The groups that one operator uses: collected and pinned first, then made readable, and
// unpinned when the operator is done.
//
//   TouchedGroups groups;
//   for (...) groups.add(*OnDemandStorage::behind(tensor));
//   groups.fill();      // collective where a group is not readable yet
//   run the operator

// REQUIRES: the groups outlive this object.
class TouchedGroups {
 public:
  TouchedGroups() = default;
  TouchedGroups(const TouchedGroups&) = delete;
  TouchedGroups& operator=(const TouchedGroups&) = delete;
  ~TouchedGroups() {
    for (auto* group : groups_) group->unpin();
    if (evict_after_every_operator()) evict_if_outermost();
  }

  void add(const OnDemandStorage& storage) {
    auto* const group = &storage.group();
    if (!groups_.empty() && groups_.back() == group) return;
    group->pin();
    groups_.push_back(group);
  }
  void fill() {
    if (groups_.empty()) return;
    const Pass pass = current_pass();
    for (auto* group : groups_) {
      if (!group->is_ready(pass)) touch(*group);
    }
  }
  // What fill() begins with. For those who look at a group before that.
  void await_failed_backwards();

 private:
  // Out of line, so that the way of ready groups stays short in every kernel.
  void touch(Touchable& group);
  void await_failed_backward(Touchable& group);
  void await_end_unpinned(OpenBackward& backward);
  void evict_if_outermost();

  c10::SmallVector<Touchable*, 8> groups_;
};

// An operator whose body may meet the gate again is running while one lives.
class OuterOperator {
 public:
  OuterOperator() { ++depth(); }
  OuterOperator(const OuterOperator&) = delete;
  OuterOperator& operator=(const OuterOperator&) = delete;
  ~OuterOperator() { --depth(); }

  static bool is_running() { return depth() > 0; }

 private:
  static int64_t& depth();
};

}  // namespace fsdp::internal
