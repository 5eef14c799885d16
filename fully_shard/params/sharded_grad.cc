#include "fully_shard/params/sharded_grad.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::internal {
namespace {

bool lies_like(const at::Tensor& gradient, const FSDPParam& param) {
  return is_dtensor(gradient) && spec_of(gradient).mesh() == param.spec().mesh() &&
         spec_of(gradient).placements() == param.spec().placements() &&
         gradient.sizes() == at::IntArrayRef(param.spec().shape());
}

void check_placement(const at::Tensor& gradient, const FSDPParam& param, const char* origin,
                     int64_t global_rank) {
  TORCH_CHECK_VALUE(
      lies_like(gradient, param), origin, " of parameter '", param.name(),
      "' is not a DTensor placed like the parameter (", to_string(param.spec()),
      "); make one with at::zeros_like(parameter), or from the gradient itself (rank ", global_rank,
      ")");
}

at::Tensor run_hooks(const FSDPParam& param, const at::Tensor& entry, at::Tensor gradient,
                     int64_t global_rank) {
  for (const auto& hook : torch::autograd::impl::hooks(entry)) {
    gradient = (*hook)({gradient}).front();
    check_placement(gradient, param, "the gradient that a hook returned", global_rank);
  }
  return gradient;
}

}  // namespace

void accumulate_sharded_grad(FSDPParam& param, const at::Tensor& part, int64_t global_rank) {
  const auto entry = param.entry();
  if (!entry.defined()) return;  // its module is gone; the reduction was issued all the same
  const auto own = make_dtensor(part, param.spec());
  set_label(own, param.gradient_label());
  auto gradient = run_hooks(param, entry, own, global_rank);
  if (entry.grad().defined()) {
    check_placement(entry.grad(), param, "the .grad", global_rank);
    entry.mutable_grad().add_(gradient);
  } else {
    entry.mutable_grad() = std::move(gradient);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(entry)) (*hook)(entry);
}

}  // namespace fsdp::internal
