#include "dtensor/redistribute/reduction_dtype.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

bool is_known_to_backends(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

}  // namespace

at::ScalarType dtype_of_reduction(at::ScalarType dtype, const std::string& what) {
  if (is_known_to_backends(dtype)) return dtype;
  if (dtype == at::kShort || dtype == at::kUInt16) return at::kInt;
  if (dtype == at::kUInt32) return at::kLong;
  TORCH_CHECK_NOT_IMPLEMENTED(false, what, ": terms of dtype ", dtype,
                              " can not be reduced; cast them first, .to(torch::kFloat)");
}

}  // namespace fsdp::internal
