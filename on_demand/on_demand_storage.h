// Storage that is empty until an operator touches it, as the gate (on_demand/gate.h) sees
// it. fully_shard/ implements the group that fills and empties it.
//
// The StorageImpl object lives as long as its tensors; filling and emptying change its
// bytes only, so saved views stay valid. While empty it keeps its logical size, and raw
// access throws a message that names the parameter.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/touchable.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <typeinfo>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
