#include "dtensor/internal/cut_indices.h"

#include <ATen/ops/ge.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <c10/util/Exception.h>

namespace fsdp::internal {

CutIndices cut_indices(const at::Tensor& indices, const Chunk& part) {
  const at::Tensor in_part = indices.sub(part.offset);
  const at::Tensor is_elsewhere = in_part.lt(0).logical_or_(in_part.ge(part.length));
  return {.in_part = in_part.masked_fill(is_elsewhere, 0), .is_elsewhere = is_elsewhere};
}

void check_indices(const at::Tensor& indices, int64_t size, const char* what) {
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto least = indices.min().item<int64_t>(), most = indices.max().item<int64_t>();
  TORCH_CHECK_INDEX(least >= 0 && most < size, what, " ", least < 0 ? least : most,
                    " is out of range: allowed are 0 to ", size - 1);
}

}  // namespace fsdp::internal
