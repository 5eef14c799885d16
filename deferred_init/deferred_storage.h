// The storage of a tensor on the meta device whose values a tape knows how to compute.
// Tensors are told apart by their storage, since LibTorch copies
// TensorImpls (make_variable, detach) and keeps storages.
#pragma once

#include "deferred_init/tape.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <typeinfo>

namespace fsdp::internal {

class DeferredStorage final : public c10::StorageImpl {
 public:
  // `raw`: bytes that raw access may read and write until forbid_raw_access(); undefined:
  // it throws from the start.
  DeferredStorage(std::shared_ptr<Tape> tape, int64_t value, const at::Tensor& raw);
  // What is written past operators from now on would not be seen: throws.
  void forbid_raw_access();
  // Kernels of the meta device compare the pointers, which are null, of what they are
  // given.
  void begin_operator();
  void end_operator();

  // Null where `tensor` is not deferred.
  static DeferredStorage* of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return nullptr;
    auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    return storage != nullptr && typeid(*storage) == typeid(DeferredStorage)
               ? static_cast<DeferredStorage*>(storage)
               : nullptr;
  }

  const std::shared_ptr<Tape>& tape() const { return tape_; }
  int64_t value() const { return value_; }

 private:
  std::shared_ptr<Tape> tape_;
  int64_t value_;
  bool forbids_raw_access_ = false;
};

// How `tensor`, which is deferred, lies in its storage.
DeferredTensor deferred_tensor(const at::Tensor& tensor);

// Gives `tensor`, of the meta device and with memory that nobody else has, a new value of
// `tape` for a storage, and the gate's key. `raw`: see DeferredStorage. Returns its
// description.
DeferredTensor defer(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                     const at::Tensor& raw = {});

// Tells ranks whether their tapes would compute the same: a hash of the operators that
// `tensor`, which is deferred, depends on, and of the states of the generators that they
// draw from. Other arguments do not count.
uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace fsdp::internal
