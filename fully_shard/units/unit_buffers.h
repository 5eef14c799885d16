// The dtype of buffers (MixedPrecisionPolicy::buffer_dtype): what a unit's modules
// compute with, and what each buffer had before, which is what checkpoints save.
//
//   UnitBuffers buffers;
//   buffers.take(found);              // floating ones that no other unit has
//   buffers.cast(at::kBFloat16);
//   buffers.cast(std::nullopt);       // as they were
//
// Buffers are cast in place: members, registry and handles taken before see it. What lies
// on the meta device is left until it has values. Local; different threads may use
// different buffers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

// What a buffer had before its unit cast it; of any other tensor its dtype.
at::ScalarType own_dtype(const at::Tensor& tensor);
// The tensor itself, or a copy in its own dtype.
at::Tensor in_own_dtype(const at::Tensor& tensor);

class UnitBuffers {
 public:
  // A buffer goes to the first unit that takes it; DTensors and what is not floating go
  // to none. Holds them weakly.
  void take(const std::vector<at::Tensor>& buffers);
  // Unset: each gets its own dtype back.
  void cast(std::optional<at::ScalarType> dtype) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<WeakTensor> buffers_;
};

}  // namespace fsdp::internal
