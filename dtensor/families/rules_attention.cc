// Which kernel attention takes must not depend on the rank.
#include "dtensor/families/rules.h"
#include "dtensor/internal/operands.h"

#include <ATen/ops/empty_strided.h>

namespace fsdp::internal {
namespace {

// _fused_sdp_choice: looks at shapes, so at tensors of the global shape. Local.
void sdp_choice_rule(OperatorCall& call) {
  const ArgumentKinds kinds(call.handle().schema());
  auto operands = kinds.operands_of(call);
  for (at::Tensor& operand : operands) {
    if (!operand.defined()) continue;
    const bool requires_grad = operand.requires_grad();
    operand = at::empty_strided(operand.sizes(), operand.strides(),
                                at::device(operand.device()).dtype(operand.dtype()));
    operand.set_requires_grad(requires_grad);
  }
  kinds.replace_operands(call, operands);
  call.finish(call.run());
}

}  // namespace

void add_attention_rules(RuleTable& table) { table["_fused_sdp_choice."] = sdp_choice_rule; }

}  // namespace fsdp::internal
