// Storage that is empty until an operator touches it, as the gate (on_demand/gate.h) sees
// it. fully_shard/ implements the group that fills and empties it.
//
// The StorageImpl object lives as long as its tensors; filling and emptying change its
// bytes only, so saved views stay valid. While empty it keeps its logical size, and raw
// access throws a message that names the parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace fsdp::internal {

// The parameters that are filled and emptied together. Not thread-safe; one thread at a
// time drives a group.
class OnDemandGroup : public c10::intrusive_ptr_target {
 public:
  // Makes the storages of the whole group readable. May be collective.
  virtual void touch() = 0;
  // Brings what autograd reads of parameter `index` (requires_grad) up to date, if `impl`
  // is the parameter itself.
  virtual void synchronize_metadata(int64_t index, c10::TensorImpl* impl) = 0;
  // An operator is about to write parameter `index` in place.
  virtual void mark_written(int64_t index) = 0;
  // Test mode: empties the group and poisons its bytes unless it is pinned.
  virtual void evict_and_poison() = 0;
  // `storage` stood for parameter `index`, which may have another one by now.
  virtual void storage_destroyed(int64_t index, const class OnDemandStorage* storage) noexcept = 0;
  virtual const std::string& parameter_name(int64_t index) const = 0;
  // Whether `impl` is parameter `index` itself, not a view of it.
  virtual bool is_member(int64_t index, const c10::TensorImpl* impl) const = 0;

  // A pinned group is not emptied.
  void pin() { pins_.fetch_add(1, std::memory_order_relaxed); }
  void unpin() { pins_.fetch_sub(1, std::memory_order_relaxed); }
  bool pinned() const { return pins_.load(std::memory_order_relaxed) != 0; }

 private:
  std::atomic<int64_t> pins_{0};
};

class OnDemandStorage final : public c10::StorageImpl {
 public:
  // Starts empty.
  OnDemandStorage(c10::intrusive_ptr<OnDemandGroup> group, int64_t index, int64_t nbytes,
                  c10::Device device);
  ~OnDemandStorage() override;

  // The on-demand storage behind `impl`, or null. Checks the storage's type, since set_()
  // keeps keys.
  static OnDemandStorage* of(const c10::TensorImpl* impl);

  OnDemandGroup& group() const { return *group_; }
  int64_t index() const { return index_; }
  // `data` stays owned by the caller, who keeps it alive until empty().
  void fill(void* data);
  void empty();

 private:
  c10::intrusive_ptr<OnDemandGroup> group_;
  int64_t index_;
};

// Test mode, process-wide: after every outermost operator that touched a group, empty and
// poison it. With it a result can not depend on a group being resident by luck.
void set_evict_after_every_operator(bool enabled);
bool evict_after_every_operator();

}  // namespace fsdp::internal
