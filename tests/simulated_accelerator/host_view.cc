#include "tests/simulated_accelerator/host_view.h"

#include "tests/simulated_accelerator/machine.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

constexpr int64_t kMostPieces = 16;  // of a tensor; more count as one range

// A piece of memory, and how often and how far from one another it is repeated.
struct Repeats {
  int64_t count, stride;  // in elements
};

// The innermost elements that follow one another, and the dimensions around them.
std::pair<int64_t, std::vector<Repeats>> pieces_of(const at::Tensor& tensor) {
  std::vector<Repeats> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0)
      dims.push_back({tensor.size(d), tensor.stride(d)});
  }
  std::sort(dims.begin(), dims.end(),
            [](const Repeats& a, const Repeats& b) { return a.stride < b.stride; });
  int64_t piece = 1;
  auto outer = dims.begin();
  for (; outer != dims.end() && outer->stride == piece; ++outer) piece *= outer->count;
  return {piece, std::vector<Repeats>(outer, dims.end())};
}

Access range(const at::Tensor& tensor, int64_t offset, int64_t elements, bool is_written) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr()) + offset * size;
  return {first, first + elements * size, is_written};
}

Accesses accesses_of(const at::Tensor& tensor, bool is_written) {
  if (tensor.numel() == 0) return {};
  const auto [piece, repeats] = pieces_of(tensor);
  if (repeats.size() == 1 && repeats.front().count <= kMostPieces) {
    Accesses pieces;
    for (int64_t i = 0; i < repeats.front().count; ++i)
      pieces.push_back(range(tensor, i * repeats.front().stride, piece, is_written));
    return pieces;
  }
  int64_t elements = piece;
  for (const auto& [count, stride] : repeats) elements += (count - 1) * stride;
  return {range(tensor, 0, elements, is_written)};
}

at::Tensor with_flag_of(const at::Tensor& original, at::Tensor copy) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto* const data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

Accesses reads(const at::Tensor& tensor) { return accesses_of(tensor, false); }
Accesses writes(const at::Tensor& tensor) { return accesses_of(tensor, true); }

void add(Accesses& to, const Accesses& more) { to.insert(to.end(), more.begin(), more.end()); }

at::Tensor copy_of_host_value(const at::Tensor& value) {
  const PlainKernels plain;
  return with_flag_of(value, value.clone());
}

at::Tensor filled_like(const at::Tensor& tensor, int64_t number) {
  const PlainKernels plain;
  auto filled = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  return with_flag_of(tensor, filled.fill_(number));
}

}  // namespace fsdp::testing::simulated
