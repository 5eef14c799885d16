#include "checkpoint/io/strided_elements.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kBytesAtOnce = int64_t{64} << 20;

// From the first element to behind the last. REQUIRES: there is one.
int64_t extent_of(c10::IntArrayRef shape, const std::vector<int64_t>& strides) {
  int64_t extent = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) extent += (shape[dim] - 1) * strides[dim];
  return extent;
}

}  // namespace

absl::Status StridedElements::read(const std::vector<int64_t>& from, const at::Tensor& target,
                                   BlockBuffer& buffer) const {
  if (target.numel() == 0) return absl::OkStatus();
  const auto& strides = elements_.strides;
  int64_t first = 0;
  for (size_t dim = 0; dim < from.size(); ++dim) first += from[dim] * strides[dim];
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype_));
  const int64_t extent = extent_of(target.sizes(), strides) * bytes;
  if (extent <= kBytesAtOnce) return read_at_once(first, target, buffer);
  const int64_t dim = std::max_element(strides.begin(), strides.end()) - strides.begin();
  const int64_t stride = strides[static_cast<size_t>(dim)];
  const int64_t step = std::max<int64_t>(1, kBytesAtOnce / std::max<int64_t>(1, stride * bytes));
  for (int64_t begin = 0; begin < target.size(dim); begin += step) {
    const int64_t length = std::min(step, target.size(dim) - begin);
    const auto read =
        read_at_once(first + begin * stride, target.narrow(dim, begin, length), buffer);
    if (!read.ok()) return read;
  }
  return absl::OkStatus();
}

absl::Status StridedElements::read_at_once(int64_t first, const at::Tensor& target,
                                           BlockBuffer& buffer) const {
  const at::Tensor memory =
      at::empty({extent_of(target.sizes(), elements_.strides)}, at::TensorOptions(dtype_));
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype_));
  const auto read = file_.read(memory.mutable_data_ptr(), static_cast<int64_t>(memory.nbytes()),
                               elements_.begin + first * bytes, buffer);
  if (!read.ok()) return read;
  at::Tensor values = memory.as_strided(target.sizes(), elements_.strides);
  if (elements_.conj) values = values.conj();
  if (elements_.neg) values = values._neg_view();
  target.copy_(values);
  return absl::OkStatus();
}

}  // namespace fsdp::internal::checkpoint
