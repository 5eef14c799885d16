// Composite operators of DTensors that must not be taken apart as LibTorch would.
//
// quantile and nanquantile read a tensor's memory themselves, since LibTorch 2.15. A
// DTensor has none. So they run on the whole values, on every rank, and give a replicated
// DTensor; differentiable.
//
// On devices other than the CPU LibTorch would take others apart into kernels that it
// chooses by the device, cuDNN's and other fused ones, which have no strategies, and
// cuDNN's batch norm writes its running statistics without saying so in its schema. Here
// they are taken apart into the operators that have:
//
//   scaled_dot_product_attention   the operators of PyTorch's math backend
//   batch_norm                     native_batch_norm (dtensor/ops/normalization.cc)
//
// Plain tensors, and so models without tensor parallelism, keep the fused kernels.
//
// On all devices attention whose sequence is cut may take heads instead of rows
// (SequenceAttention::kHeads): here, above autograd, so that its backward has the tensors
// that were moved.
#include "dtensor/dtensor.h"
#include "dtensor/kernels/dispatch.h"
#include "dtensor/ops/attention_over_sequence.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace fsdp::internal {
namespace {

// Those that run on whole values.
constexpr std::array<std::pair<const char*, const char*>, 4> kOnWhole = {{
    {"aten::quantile", ""},
    {"aten::quantile", "scalar"},
    {"aten::nanquantile", ""},
    {"aten::nanquantile", "scalar"},
}};

bool is_dtensor_argument(const c10::IValue& argument) {
  return argument.isTensor() && is_dtensor(argument.toTensor());
}

// This rank's copy of the whole value. Collective where `dtensor` is not replicated.
at::Tensor whole(const at::Tensor& dtensor) {
  const auto replicated = spec_of(dtensor).replicated().placements();
  return differentiable_to_local(differentiable_redistribute(dtensor, replicated));
}

// Threads with generators of their own bring plain tensors here, too: they go on below.
void on_whole(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto* const met = std::find_if(arguments.begin(), arguments.end(), &is_dtensor_argument);
  if (met == arguments.end()) {
    op.redispatchBoxed(keys_below(kFirstKey, keys), stack);
    return;
  }
  const CommOperatorScope moving(op.schema().name());
  const CommCauseScope cause(CommCause::kWhole);
  const DTensorSpec replicated = spec_of(met->toTensor()).replicated();
  for (auto argument = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
       argument != stack->end(); ++argument) {
    if (is_dtensor_argument(*argument)) *argument = whole(argument->toTensor());
  }
  op.callBoxed(stack);
  const at::Tensor result = torch::jit::pop(*stack).toTensor();
  torch::jit::push(
      *stack, differentiable_from_local(
                  result, replicated.with_geometry(result.sizes().vec(), result.strides().vec())));
}

using OptionalTensor = std::optional<at::Tensor>;

bool is_present_dtensor(const OptionalTensor& tensor) { return tensor && is_dtensor(*tensor); }

// The mesh dimension over which heads are to be taken instead of rows; none where rows
// are.
std::optional<size_t> dim_of_heads(const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, const OptionalTensor& mask,
                                   bool is_causal) {
  for (const at::Tensor& tensor : {query, key, value})
    if (!is_dtensor(tensor) || tensor.dim() != kAttentionNdim) return std::nullopt;
  const DTensorSpec &q = spec_of(query), &k = spec_of(key), &v = spec_of(value);
  const auto m = dim_of_sequence(k);
  if (!m.has_value() || q.mesh() != k.mesh() || q.mesh() != v.mesh() ||
      !q.placements()[*m].is_shard(kAttentionSequence) ||
      !v.placements()[*m].is_shard(kAttentionSequence))
    return std::nullopt;
  const auto plan = attention_plan({.query = q.layout(),
                                    .key = k.layout(),
                                    .value = v.layout(),
                                    .is_causal = is_causal,
                                    .has_mask = mask.has_value()},
                                   *m, sequence_attention());
  return plan == SequenceAttention::kHeads ? m : std::nullopt;
}

at::Tensor moved_along(const at::Tensor& tensor, size_t m, const Placement& to) {
  auto placements = spec_of(tensor).placements();
  placements[m] = to;
  return differentiable_redistribute(tensor, placements);
}

// Calls `attend` with tensors of which each rank of mesh dimension `m` has some heads and
// the whole sequence; its result lies as the query again.
template <class Attend>
at::Tensor attention_of_heads(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, size_t m, const Attend& attend) {
  const CommCauseScope cause(CommCause::kRule);
  const AttentionLayouts layouts{.query = spec_of(query).layout(),
                                 .key = spec_of(key).layout(),
                                 .value = spec_of(value).layout()};
  const Placement keys =
      heads_can_be_cut(layouts, m) ? Placement(Shard{kAttentionHeads}) : Replicate{};
  const at::Tensor result = attend(moved_along(query, m, Shard{kAttentionHeads}),
                                   moved_along(key, m, keys), moved_along(value, m, keys));
  return moved_along(result, m, spec_of(query).placements()[m]);
}

at::Tensor attention(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                     double dropout_p, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  const bool has_dtensor = is_dtensor(query) || is_dtensor(key) || is_dtensor(value);
  if (const auto m = dim_of_heads(query, key, value, attn_mask, is_causal)) {
    static const std::string name = "aten::scaled_dot_product_attention";
    const CommOperatorScope moving(name);
    return attention_of_heads(query, key, value, *m,
                              [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                                return at::scaled_dot_product_attention(
                                    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa);
                              });
  }
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

void register_composites(KernelHandles& handles) {
  for (const auto& [name, overload] : kOnWhole) {
    handles.push_back(c10::Dispatcher::singleton().registerImpl(
        {name, overload}, kFirstKey, c10::KernelFunction::makeFromBoxedFunction<&on_whole>(),
        std::nullopt, nullptr, "fsdp DTensor composites"));
  }
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
