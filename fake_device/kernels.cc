#include "fake_device/kernels.h"

#include "fake_device/fake_device.h"
#include "fake_device/shape_kernel.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>
#include <tuple>

namespace fsdp {
namespace internal {
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

std::atomic<FakeAttention> attention = FakeAttention::kFused;

// Of four dimensions alone, as on CUDA.
int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                         bool) {
  const bool is_fused = attention == FakeAttention::kFused && query.dim() == 4;
  return static_cast<int64_t>(is_fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

// Of `products` products of scores' size. Half of the scores of causal attention are not
// computed.
double flops_of(const at::Tensor& query, const at::Tensor& key, bool is_causal, double products) {
  const auto scores = static_cast<double>(query.numel()) * static_cast<double>(key.size(2));
  return 2 * products * scores * (is_causal ? 0.5 : 1);
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                           at::Tensor, at::Tensor, at::Tensor>;

// Keeps the output and a float for each query, as flash attention does.
Forward attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>&, double, bool is_causal, bool,
               std::optional<double>) {
  count_flops(flops_of(query, key, is_causal, 2));
  auto shape = query.sizes().vec();
  shape.back() = value.size(-1);
  const auto numbers = query.options().dtype(at::kLong);
  const auto seed = at::empty({}, numbers.device(at::kCPU));
  return {
      at::empty(shape, query.options()),
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat)),
      at::Tensor(),
      at::Tensor(),
      query.size(2),
      key.size(2),
      seed,
      seed,
      at::Tensor()};
}

using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Computes the scores again: five products.
Backward attend_backward(const at::Tensor&, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& bias,
                         std::array<bool, 4> wanted, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&, int64_t, int64_t, double,
                         bool is_causal, const at::Tensor&, const at::Tensor&,
                         std::optional<double>) {
  count_flops(flops_of(query, key, is_causal, 5));
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value),
          wanted[3] && bias.defined() ? at::empty_like(bias) : at::Tensor()};
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

void register_attention_kernels(torch::Library& library) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

}  // namespace internal

void set_fake_attention(FakeAttention chosen) { internal::attention = chosen; }

}  // namespace fsdp
