// How far a sum of gradients over ranks may be from the one that was added in another
// order.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/abs.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>

namespace fsdp::testing {

inline double epsilon_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 1.0 / 1024;
    case at::kBFloat16:
      return 1.0 / 128;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// For a sum of `terms` values whose absolute values add up to `magnitude`.
inline at::Tensor gradient_bound(const at::Tensor& magnitude, int64_t terms) {
  return magnitude * (static_cast<double>(terms - 1) * epsilon_of(magnitude.scalar_type()));
}

// Every element of `actual` is within `bound` of `expected`.
inline bool is_within(const at::Tensor& actual, const at::Tensor& expected,
                      const at::Tensor& bound) {
  return ((actual - expected).abs() <= bound).all().item<bool>();
}

}  // namespace fsdp::testing
