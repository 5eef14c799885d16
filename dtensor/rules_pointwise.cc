// Elementwise operators, functional, in-place and out=.
#include "dtensor/dtensor_impl.h"
#include "dtensor/pointwise.h"
#include "dtensor/rules.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

struct Operands {
  std::vector<size_t> arguments;
  std::vector<at::Tensor> tensors;
  std::optional<size_t> written;
};

Operands operands_of(const OperatorCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(call.traits().written.size() <= 1, call.description(), ": no sharding rule for operators ",
                              "with several outputs written in place; use the functional form");
  Operands operands;
  for (size_t i = 0; i < call.argument_count(); ++i) {
    const c10::IValue& argument = call.argument(i);
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    if (!call.traits().written.empty() && call.traits().written[0] == i) operands.written = operands.tensors.size();
    operands.arguments.push_back(i);
    operands.tensors.push_back(argument.toTensor());
  }
  return operands;
}

template <Linearity linearity>
void pointwise_rule(OperatorCall& call) {
  Operands operands = operands_of(call);
  auto plan = plan_pointwise({operands.tensors, operands.written, linearity}, call.name());
  for (size_t i = 0; i < operands.arguments.size(); ++i) {
    call.argument(operands.arguments[i]) = std::move(plan.locals[i]);
  }
  auto results = call.run();
  for (size_t i = 0; i < results.size(); ++i) {
    if (call.traits().returned_argument[i].has_value()) {
      results[i] = operands.tensors[*operands.written];
    } else {
      results[i] = make_dtensor(results[i].toTensor(), plan.result);
    }
  }
  call.finish(std::move(results));
}

// Operators that need whole operands.
constexpr const char* kPlain[] = {
    "abs", "acos", "acosh", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "celu", "clamp",
    "clamp_max", "clamp_min", "copysign", "cos", "cosh", "deg2rad", "digamma", "div.Tensor_mode", "div.Scalar_mode",
    "div.out_mode", "elu", "elu_backward", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "hypot", "isinf", "isnan", "isneginf", "isposinf", "le", "leaky_relu",
    "leaky_relu_backward", "lerp", "lgamma", "log", "log10", "log1p", "log2", "logaddexp",
    "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum",
    "minimum", "mish", "nan_to_num", "ne", "nextafter", "pow", "rad2deg", "reciprocal", "relu", "remainder", "round",
    "rsqrt", "rsub", "sgn", "sigmoid", "sigmoid_backward", "sign", "signbit", "silu", "silu_backward", "sin", "sinc",
    "sinh", "softplus", "softplus_backward", "sqrt", "square", "tan", "tanh", "tanh_backward", "threshold",
    "threshold_backward", "trunc", "where.self", "where.self_out", "xlogy"};

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  const auto add = [&table](const std::string& name, Rule rule) { add_with_in_place(table, name, rule); };
  for (const char* name : kPlain) add(name, pointwise_rule<Linearity::kNone>);
  for (const char* name : {"neg", "positive"}) add(name, pointwise_rule<Linearity::kUnary>);
  for (const char* name : {"add", "sub"}) add(name, pointwise_rule<Linearity::kSum>);
  for (const char* name : {"add.Scalar", "sub.Scalar"}) add(name, pointwise_rule<Linearity::kNone>);
  for (const char* name : {"mul", "div"}) add(name, pointwise_rule<Linearity::kScale>);
  add("fill", pointwise_rule<Linearity::kIdempotent>);
  add("zero", pointwise_rule<Linearity::kAny>);
}

}  // namespace fsdp::internal
