// Products of vectors: dot and vdot. Over a cut dimension the result is Partial(sum).
#include "dtensor/families/pointwise.h"
#include "dtensor/families/reduction.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"

#include <utility>

namespace fsdp::internal {
namespace {

void dot_rule(OperatorCall& call) {
  const PointwiseOperands operands(call);
  const at::Tensor& self = operands.tensors[0];
  const at::Tensor& other = operands.tensors[1];
  TORCH_CHECK_VALUE(self.dim() == 1 && self.sizes() == other.sizes(), call.description(),
                    ": expected two vectors of ", "one length");
  auto plan = plan_pointwise({call, operands.tensors, std::nullopt, Linearity::kNone});
  call.argument(0) = std::move(plan.locals[0]);
  call.argument(1) = std::move(plan.locals[1]);
  auto results = call.run();
  auto spec = reduced_spec(plan.result, ReducedDims::all_of(self), Partial{});
  call.finish(make_dtensor(results[0].toTensor(), std::move(spec)));
}

}  // namespace

void add_product_rules(RuleTable& table) {
  for (const char* name : {"dot.", "vdot."}) table[name] = dot_rule;
}

}  // namespace fsdp::internal
