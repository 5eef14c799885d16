#include "dtensor/kernels/composites_on_devices.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_key.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <tuple>

namespace fsdp::internal {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool is_present_dtensor(const OptionalTensor& tensor) { return tensor && is_dtensor(*tensor); }

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

at::Tensor batch_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                      const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      bool training, double momentum, double eps, bool cudnn_enabled) {
  const bool has_dtensor =
      is_dtensor(input) || is_present_dtensor(weight) || is_present_dtensor(running_mean);
  if (!has_dtensor || input.is_cpu() || input.numel() == 0) {
    return at::_ops::batch_norm::redispatch(keys_below(kFirstKey, keys), input, weight, bias,
                                            running_mean, running_var, training, momentum, eps,
                                            cudnn_enabled);
  }
  return std::get<0>(at::native_batch_norm(input, weight, bias, running_mean, running_var, training,
                                           momentum, eps));
}

}  // namespace

void register_composites_on_devices(std::vector<c10::RegistrationHandleRAII>& handles) {
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      {"aten::scaled_dot_product_attention", ""}, kFirstKey,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&attention), std::nullopt, nullptr,
      "fsdp DTensor attention"));
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      {"aten::batch_norm", ""}, kFirstKey,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&batch_norm), std::nullopt, nullptr,
      "fsdp DTensor batch norm"));
}

}  // namespace fsdp::internal
