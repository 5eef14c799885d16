// What an on-demand storage tells of operators: that they are about to use it, and, for
// parameters, that they are about to write it. The gate (on_demand/gate.h) calls,
// fully_shard/ implements.
//
//   void touch() override { gather(); settle(current_pass()); }   // until something changes:
//   void reshard() { unsettle(); free(); }
#pragma once

#include "on_demand/open_backward.h"
#include "on_demand/pass.h"

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace at {
class Tensor;
}
namespace c10 {
struct TensorImpl;
}

namespace fsdp::internal {

class OnDemandStorage;

// Storages that are made readable together. One thread at a time drives it.
class Touchable : public c10::intrusive_ptr_target {
 public:
  // Makes the storages readable, for the calling thread's stream, or throws. May be
  // collective. Not called while settled.
  virtual void touch() = 0;
  virtual const std::string& parameter_name(int64_t index) const = 0;
  // `storage` belonged to this, and may be followed by another one by now.
  virtual void storage_destroyed(int64_t /*index*/, const OnDemandStorage* /*storage*/) noexcept {}
  // Test mode: empties what there is to empty, and poisons its bytes, unless pinned.
  virtual void evict_and_poison() {}

  // Until unsettle(), or settle() of another pass, a touch in `pass` would do nothing,
  // and is left out. REQUIRES: the storages are readable.
  void settle(Pass pass) { settled_.store(mark_of(pass), std::memory_order_release); }
  void unsettle() { settled_.store(kUnsettled, std::memory_order_release); }
  bool settled(Pass pass) const {
    return settled_.load(std::memory_order_acquire) == mark_of(pass);
  }
  // The same on a device, where the calling thread's stream may be another one each time:
  // touch() is called all the same, and has nothing but that to look at.
  void settle_but_for_stream(Pass pass) {
    settled_.store(mark_of(pass) | kStreamMatters, std::memory_order_release);
  }
  bool settled_but_for_stream(Pass pass) const {
    return settled_.load(std::memory_order_acquire) == (mark_of(pass) | kStreamMatters);
  }

  // A backward that failed and whose end, on another thread, empties what is not pinned:
  // nothing may be pinned, or looked at, before that. Null for none, and on the CPU.
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
  static constexpr uint8_t kUnsettled = 0;
  static constexpr uint8_t kStreamMatters = 0x80;
  static constexpr uint8_t mark_of(Pass pass) { return static_cast<uint8_t>(pass) + 1; }

  std::atomic<int64_t> pins_{0};
  std::atomic<uint8_t> settled_{kUnsettled};
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
  // The same, before the group is made readable for the operator.
  virtual void before_member_write(int64_t /*index*/) {}
};

}  // namespace fsdp::internal
