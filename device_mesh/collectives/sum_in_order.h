// The sum of rows of several ranks, in the order of the ranks: how every sum of rows that
// this process adds up is made, so that all give the same bits. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// The type in which values of `dtype` are added: float for Half and BFloat16, else
// `dtype`.
at::ScalarType sum_dtype(at::ScalarType dtype);

// The rows (uint8, contiguous elements of `dtype`, of one size) added one after another:
// [elements] of sum_dtype(dtype).
at::Tensor sum_in_order(const std::vector<at::Tensor>& rows, at::ScalarType dtype);

}  // namespace fsdp::internal
