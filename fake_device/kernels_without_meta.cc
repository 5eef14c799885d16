#include "fake_device/kernels.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace fsdp::internal {
namespace {

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  auto shape = self.sizes().vec();
  if (!shape.empty()) shape[static_cast<size_t>(dim < 0 ? dim + self.dim() : dim)] = index.numel();
  return at::empty(shape, self.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor&, int64_t rows,
                                    int64_t, bool) {
  return at::empty({rows, grad.size(-1)}, grad.options());
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The mean and the reciprocal deviation are one number for each row, in float as on CUDA.
Three native_layer_norm(const at::Tensor& input, at::IntArrayRef normalized,
                        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                        double) {
  auto rows = input.sizes().vec();
  for (size_t i = 0; i < normalized.size(); ++i) rows[rows.size() - 1 - i] = 1;
  const auto statistics = input.options().dtype(at::toOpMathType(input.scalar_type()));
  return {at::empty_like(input), at::empty(rows, statistics), at::empty(rows, statistics)};
}

Three native_layer_norm_backward(const at::Tensor&, const at::Tensor& input, at::IntArrayRef,
                                 const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>& weight,
                                 const std::optional<at::Tensor>& bias,
                                 std::array<bool, 3> wanted) {
  const auto like = [](bool is_wanted, const std::optional<at::Tensor>& tensor) {
    return is_wanted && tensor && tensor->defined() ? at::empty_like(*tensor) : at::Tensor();
  };
  return {like(wanted[0], input), like(wanted[1], weight), like(wanted[2], bias)};
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double,
                                                  std::optional<bool>) {
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor&, double) {
  return at::empty_like(grad);
}

at::Tensor dot(const at::Tensor& self, const at::Tensor&) { return at::empty({}, self.options()); }

// As item(): there is nothing that could differ.
bool equal(const at::Tensor& self, const at::Tensor& other) {
  return self.sizes() == other.sizes();
}

}  // namespace

void register_kernels_without_meta(torch::Library& library) {
  library.impl("dot", &dot);
  library.impl("equal", &equal);
  library.impl("index_select", &index_select);
  library.impl("embedding_dense_backward", &embedding_dense_backward);
  library.impl("native_layer_norm", &native_layer_norm);
  library.impl("native_layer_norm_backward", &native_layer_norm_backward);
  library.impl("native_dropout", &native_dropout);
  library.impl("native_dropout_backward", &native_dropout_backward);
}

}  // namespace fsdp::internal
