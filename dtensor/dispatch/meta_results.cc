#include "dtensor/dispatch/meta_results.h"

#include <ATen/ops/empty_strided.h>

namespace fsdp::internal {

std::vector<ResultGeometry> meta_results(const OperatorCall& call, const ArgumentKinds& kinds) {
  torch::jit::Stack stack = call.arguments();
  OperatorCall on_meta(call.handle(), call.traits(), {}, &stack);
  auto operands = kinds.operands_of(on_meta);
  for (at::Tensor& operand : operands) {
    if (!operand.defined()) continue;
    operand =
        at::empty_strided(operand.sizes(), operand.strides(), operand.options().device(c10::kMeta));
  }
  kinds.replace_operands(on_meta, operands);
  std::vector<ResultGeometry> results;
  const auto add = [&results](const at::Tensor& result) {
    results.push_back({.shape = result.sizes().vec(), .stride = result.strides().vec()});
  };
  for (const c10::IValue& result : on_meta.run()) {
    if (result.isTensor()) {
      add(result.toTensor());
    } else {
      for (const at::Tensor& element : result.toTensorVector()) add(element);
    }
  }
  return results;
}

}  // namespace fsdp::internal
