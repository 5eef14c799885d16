// The tensors among an operator's arguments, as its schema numbers them: those of lists
// one by one, absent optional ones as undefined tensors. And what of its other arguments
// matters for where results lie.
#pragma once

#include "dtensor/internal/operator_call.h"
#include "dtensor/ways/call_geometry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <vector>

namespace fsdp::internal {

class ArgumentKinds {
 public:
  explicit ArgumentKinds(const c10::FunctionSchema& schema);

  // Which operand argument `argument`, a tensor, is in calls without lists before it.
  size_t operand_at(size_t argument) const;
  std::vector<at::Tensor> operands_of(const OperatorCall& call) const;
  // The inverse. REQUIRES: as many tensors as operands_of gave.
  void replace_operands(OperatorCall& call, const std::vector<at::Tensor>& operands) const;
  // One per argument.
  std::vector<PlainArgument> plain_of(const OperatorCall& call) const;

 private:
  enum class Kind { kTensor, kTensors, kPlain, kOther };
  static Kind kind_of(const c10::Type& type);

  std::vector<Kind> kinds_;
};

}  // namespace fsdp::internal
