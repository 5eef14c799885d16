// The common case of elementwise operators: all DTensors have the same placements, so the
// operator runs on their local tensors. Free of allocations.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// Whether the DTensors looked at so far have one spec, without Partial, and the other
// tensors are numbers.
class SamePlacements {
 public:
  void look(const at::Tensor& tensor) {
    const auto* const meta = find_meta(tensor);
    if (meta == nullptr) {
      if (!tensor.defined()) return;
      alike_ &= tensor.dim() == 0;
      has_plain_ |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return;
    }
    from_parameter_ |= meta->from_parameter;
    if (first_ == nullptr) {
      first_ = &tensor;
      spec_ = &meta->spec;
      alike_ &= !meta->spec.has_partial();
    } else {
      alike_ &= meta->spec == *spec_;
    }
  }

  bool alike() const { return alike_ && first_ != nullptr; }
  const DTensorSpec& spec() const { return *spec_; }  // of the first
  // Whether the first lies in memory without gaps, where a result is to lie like it.
  bool is_dense() const { return first_->is_non_overlapping_and_dense(); }
  bool from_parameter() const { return from_parameter_; }
  // Beside what comes from a parameter, a number that came as a plain tensor is this
  // rank's own (implicit_replication.h).
  bool has_own_number() const { return from_parameter_ && has_plain_; }

 private:
  const at::Tensor* first_ = nullptr;
  const DTensorSpec* spec_ = nullptr;  // of the first
  bool alike_ = true;
  bool from_parameter_ = false;
  bool has_plain_ = false;  // but for numbers that a caller wrote
};

}  // namespace fsdp::internal
