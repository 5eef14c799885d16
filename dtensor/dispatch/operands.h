// The tensors among an operator's arguments, as its schema numbers them: those of lists
// one by one, absent optional ones as undefined tensors. And what of its other arguments
// matters for where results lie.
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/op_schema.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

// Most operators have few.
using Operands = c10::SmallVector<at::Tensor, 4>;

class ArgumentKinds {
 public:
  ArgumentKinds() = default;  // of no arguments
  // `reals`: the arguments at these places are real numbers that matter.
  explicit ArgumentKinds(const c10::FunctionSchema& schema, const std::vector<size_t>& reals = {});

  // Which operand argument `argument`, a tensor, is in calls without lists before it.
  size_t operand_at(size_t argument) const;
  Operands operands_of(const OperatorCall& call) const;
  // Which argument each of them is, or is in.
  std::vector<size_t> arguments_of_operands(const OperatorCall& call) const;
  // The inverse. REQUIRES: as many tensors as operands_of gave.
  void replace_operands(OperatorCall& call, at::TensorList operands) const;
  size_t size() const { return kinds_.size(); }
  // Whether argument `argument` is one that results may depend on, and no tensor.
  bool is_plain(size_t argument) const {
    const Kind kind = kinds_[argument];
    return kind == Kind::kPlain || kind == Kind::kDtype || kind == Kind::kReal;
  }
  // Where the device of what is made is given; none for most operators.
  const std::optional<size_t>& device() const { return device_; }
  // One per argument.
  std::vector<PlainArgument> plain_of(const OperatorCall& call) const;

 private:
  enum class Kind { kTensor, kTensors, kPlain, kDtype, kReal, kOther };
  static Kind kind_of(const c10::Argument& argument);

  std::vector<Kind> kinds_;
  std::optional<size_t> device_ = {};
};

Dtype dtype_of(at::ScalarType dtype);

// Of a whole number or truth value, or a list of such; none for anything else.
PlainArgument plain_argument(const c10::IValue& value);

}  // namespace fsdp::internal
