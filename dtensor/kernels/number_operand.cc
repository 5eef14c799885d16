#include "dtensor/kernels/number_operand.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::internal {
namespace {

// Past the dispatcher, where other modes of the caller's would meet it: it outlives them.
at::Tensor empty_number() {
  const c10::InferenceMode usual(false);
  return at::Tensor(at::detail::empty_cpu({}, at::kFloat));
}

}  // namespace

const at::Tensor* number_operand(const at::Tensor& operand, const at::Scalar& number) {
  if (!operand.is_cpu() || operand.scalar_type() != at::kFloat) return nullptr;
  if (number.isSymbolic()) return nullptr;
  const bool is_whole = number.isIntegral(/*includeBool=*/true);
  if (!is_whole && !number.isFloatingPoint()) return nullptr;
  static thread_local const at::Tensor kept = empty_number();
  *static_cast<float*>(kept.unsafeGetTensorImpl()->mutable_data()) =
      is_whole ? static_cast<float>(number.toLong()) : static_cast<float>(number.toDouble());
  return &kept;
}

}  // namespace fsdp::internal
