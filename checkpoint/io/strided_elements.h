// A tensor of a file that does not lie there in row-major order, or whose values are to
// be conjugated or negated: channels last, transposed, expanded, a slice of another.
#pragma once

#include "checkpoint/io/verified_file.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal::checkpoint {

class StridedElements {
 public:
  // `elements.strides` are as many as the tensor has dimensions. `file` outlives it.
  StridedElements(const VerifiedFile& file, StoredElements elements, c10::ScalarType dtype)
      : file_(file), elements_(std::move(elements)), dtype_(dtype) {}

  // Fills `target`, of any device, dtype and strides, with the box of its shape that
  // begins at `from`. Reads what lies between the box's first and last element, 64 MiB at
  // a time, or as much as one index of the dimension with the largest stride spans.
  absl::Status read(const std::vector<int64_t>& from, const at::Tensor& target,
                    BlockBuffer& buffer) const;

 private:
  absl::Status read_at_once(int64_t first, const at::Tensor& target, BlockBuffer& buffer) const;

  const VerifiedFile& file_;
  const StoredElements elements_;
  const c10::ScalarType dtype_;
};

}  // namespace fsdp::internal::checkpoint
