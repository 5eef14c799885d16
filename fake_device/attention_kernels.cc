#include "fake_device/fake_device.h"
#include "fake_device/flops.h"
#include "fake_device/kernels.h"

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

void register_attention_kernels(torch::Library& library) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

}  // namespace internal

void set_fake_attention(FakeAttention chosen) { internal::attention = chosen; }

}  // namespace fsdp
