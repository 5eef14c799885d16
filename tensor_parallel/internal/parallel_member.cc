#include "tensor_parallel/internal/parallel_member.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "on_demand/deferred_part.h"
#include "tensor_parallel/internal/gradients_home.h"
#include "tensor_parallel/internal/parallel_gate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace fsdp::internal {
namespace {

struct MemberStyle final : c10::intrusive_ptr_target {
  explicit MemberStyle(const ParameterUses& what) : uses(what) {}
  ParameterUses uses;
};

}  // namespace

void make_parallel_member(const PlannedParameter& parameter) {
  const at::NoGradGuard no_grad;
  install_parallel_gate();
  const at::Tensor& member = parameter.member;
  const at::Tensor local =
      local_part(member.detach(), parameter.spec).clone(at::MemoryFormat::Contiguous);
  const KeysOfNewDTensors parallel{c10::DispatchKeySet(kParallelKey)};
  const at::Tensor becomes = make_dtensor(local, parameter.spec);
  set_style(becomes, c10::make_intrusive<MemberStyle>(parameter.uses));
  if (local.is_meta()) make_deferred_part(becomes, parameter.path);
  member.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
  bring_gradients_home(member);
}

const ParameterUses* uses_of(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? find_meta(tensor) : nullptr;
  if (meta == nullptr || !meta->style) return nullptr;
  return &static_cast<const MemberStyle*>(meta->style.get())->uses;
}

}  // namespace fsdp::internal
