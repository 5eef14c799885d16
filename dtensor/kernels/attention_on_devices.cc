#include "dtensor/kernels/attention_on_devices.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_key.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <tuple>

namespace fsdp::internal {
namespace {

at::Tensor attention(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                     double dropout_p, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  const bool has_dtensor = is_dtensor(query) || is_dtensor(key) || is_dtensor(value);
  if (!has_dtensor || query.is_cpu()) {
    return at::_ops::scaled_dot_product_attention::redispatch(keys_below(kFirstKey, keys), query,
                                                              key, value, attn_mask, dropout_p,
                                                              is_causal, scale, enable_gqa);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, attn_mask, dropout_p, is_causal, /*dropout_mask=*/{}, scale, enable_gqa));
}

}  // namespace

void register_attention_on_devices(std::vector<c10::RegistrationHandleRAII>& handles) {
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      {"aten::scaled_dot_product_attention", ""}, kFirstKey,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&attention), std::nullopt, nullptr,
      "fsdp DTensor attention"));
}

}  // namespace fsdp::internal
