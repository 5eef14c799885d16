#include "tensor_parallel/internal/parallel_member.h"

#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/deferred_part.h"
#include "tensor_parallel/internal/gradient_placement.h"
#include "tensor_parallel/internal/parallel_gate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace fsdp::internal {

void make_parallel_member(const PlannedParameter& parameter, uint32_t number_of_model,
                          const std::shared_ptr<FirstSteps>& steps) {
  const at::NoGradGuard no_grad;
  install_parallel_gate();
  const at::Tensor& member = parameter.member;
  const at::Tensor local =
      local_part(member.detach(), parameter.spec).clone(at::MemoryFormat::Contiguous);
  const KeysOfNewDTensors parallel{c10::DispatchKeySet(kParallelKey)};
  const at::Tensor becomes = make_dtensor(local, parameter.spec);
  auto style = c10::make_intrusive<MemberStyle>();
  style->uses = parameter.uses;
  style->path = parameter.path;
  style->number_of_model = number_of_model;
  style->steps = steps;
  set_style(becomes, std::move(style));
  if (local.is_meta()) make_deferred_part(becomes, parameter.path);
  member.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
  bring_gradients_home(member);
}

MemberStyle* style_of(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? find_meta(tensor) : nullptr;
  return meta == nullptr ? nullptr : static_cast<MemberStyle*>(meta->style.get());
}

const ParameterUses* uses_of(const at::Tensor& tensor) {
  const MemberStyle* const style = style_of(tensor);
  return style == nullptr ? nullptr : &style->uses;
}

}  // namespace fsdp::internal
