// Elementwise operators, functional, in-place and out=.
#include "dtensor/dtensor.h"
#include "dtensor/families/alike.h"
#include "dtensor/families/pointwise.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"

#include <utility>

namespace fsdp::internal {
namespace {

Alike look_at(const OperatorCall& call) {
  Alike operands;
  for (size_t i = 0; i < call.argument_count(); ++i) {
    if (call.argument(i).isTensor()) operands.look(call.argument(i).toTensor());
  }
  return operands;
}

void localize_arguments(OperatorCall& call) {
  for (size_t i = 0; i < call.argument_count(); ++i) {
    c10::IValue& argument = call.argument(i);
    if (argument.isTensor() && is_dtensor(argument.toTensor()))
      argument = local_of(argument.toTensor());
  }
}

// True when it could: an operator that writes one DTensor, hands it back, and needs
// nothing moved.
bool run_in_place(OperatorCall& call) {
  const OperatorTraits& traits = call.traits();
  if (traits.written.size() != 1 || traits.returned_argument.size() != 1) return false;
  const c10::IValue& written = call.argument(traits.written[0]);
  if (!written.isTensor() || !is_dtensor(written.toTensor()) || !look_at(call).alike())
    return false;
  at::Tensor self = written.toTensor();
  localize_arguments(call);
  call.run_in_place();
  call.result(0) = std::move(self);
  return true;
}

// The same for an operator that writes nothing and has one result.
bool run_alike(OperatorCall& call) {
  const OperatorTraits& traits = call.traits();
  if (!traits.written.empty() || traits.returned_argument.size() != 1) return false;
  const auto operands = look_at(call);
  if (!operands.alike() || !operands.is_dense()) return false;
  DTensorSpec spec = spec_of(operands.first());
  localize_arguments(call);
  call.run_in_place();
  call.result(0) = make_dtensor(call.result(0).toTensor(), std::move(spec));
  return true;
}

template <Linearity linearity>
void pointwise_rule(OperatorCall& call) {
  if (run_in_place(call) || run_alike(call)) return;
  const PointwiseOperands operands(call);
  run_pointwise(call, operands,
                plan_pointwise({call, operands.tensors, operands.written, linearity}));
}

// masked_fill(self, mask, value): zeros can be filled in term by term.
void masked_fill_rule(OperatorCall& call) {
  const bool fills_zero = call.argument(2).toScalar().equal(0);
  return fills_zero ? pointwise_rule<Linearity::kScale>(call)
                    : pointwise_rule<Linearity::kNone>(call);
}

// Operators that need whole operands.
constexpr const char* kPlain[] = {"abs",
                                  "acos",
                                  "acosh",
                                  "addcdiv",
                                  "addcmul",
                                  "angle",
                                  "asin",
                                  "asinh",
                                  "atan",
                                  "atan2",
                                  "atanh",
                                  "bitwise_and",
                                  "bitwise_left_shift",
                                  "bitwise_not",
                                  "bitwise_or",
                                  "bitwise_right_shift",
                                  "bitwise_xor",
                                  "ceil",
                                  "celu",
                                  "clamp",
                                  "clamp_max",
                                  "clamp_min",
                                  "copysign",
                                  "cos",
                                  "cosh",
                                  "deg2rad",
                                  "digamma",
                                  "div.Tensor_mode",
                                  "div.Scalar_mode",
                                  "div.out_mode",
                                  "elu",
                                  "elu_backward",
                                  "eq",
                                  "erf",
                                  "erfc",
                                  "erfinv",
                                  "exp",
                                  "exp2",
                                  "expm1",
                                  "floor",
                                  "floor_divide",
                                  "fmax",
                                  "fmin",
                                  "fmod",
                                  "frac",
                                  "ge",
                                  "gelu",
                                  "gelu_backward",
                                  "gt",
                                  "hardsigmoid",
                                  "hardsigmoid_backward",
                                  "hardswish",
                                  "hardswish_backward",
                                  "hardtanh",
                                  "hardtanh_backward",
                                  "heaviside",
                                  "hypot",
                                  "isinf",
                                  "isnan",
                                  "isneginf",
                                  "isposinf",
                                  "le",
                                  "leaky_relu",
                                  "leaky_relu_backward",
                                  "lerp",
                                  "lgamma",
                                  "log",
                                  "log10",
                                  "log1p",
                                  "log2",
                                  "logaddexp",
                                  "logaddexp2",
                                  "logical_and",
                                  "logical_not",
                                  "logical_or",
                                  "logical_xor",
                                  "logit",
                                  "logit_backward",
                                  "lt",
                                  "masked_fill",
                                  "maximum",
                                  "minimum",
                                  "mish",
                                  "mish_backward",
                                  "nan_to_num",
                                  "ne",
                                  "nextafter",
                                  "pow",
                                  "rad2deg",
                                  "reciprocal",
                                  "relu",
                                  "remainder",
                                  "round",
                                  "rsqrt",
                                  "rsub",
                                  "sgn",
                                  "sigmoid",
                                  "sigmoid_backward",
                                  "sign",
                                  "signbit",
                                  "silu",
                                  "silu_backward",
                                  "sin",
                                  "sinc",
                                  "sinh",
                                  "softplus",
                                  "softplus_backward",
                                  "sqrt",
                                  "square",
                                  "tan",
                                  "tanh",
                                  "tanh_backward",
                                  "threshold",
                                  "threshold_backward",
                                  "trunc",
                                  "where.self",
                                  "where.self_out",
                                  "xlogy"};

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  const auto add = [&table](const std::string& name, Rule rule) {
    add_with_in_place(table, name, rule);
  };
  for (const char* name : kPlain) add(name, pointwise_rule<Linearity::kNone>);
  for (const char* name : {"neg", "positive"}) add(name, pointwise_rule<Linearity::kUnary>);
  for (const char* name : {"add", "sub"}) add(name, pointwise_rule<Linearity::kSum>);
  for (const char* name : {"add.Scalar", "sub.Scalar"}) add(name, pointwise_rule<Linearity::kNone>);
  add("masked_fill.Scalar", masked_fill_rule);
  add("mul", pointwise_rule<Linearity::kProduct>);
  add("div", pointwise_rule<Linearity::kScale>);
  add("fill", pointwise_rule<Linearity::kIdempotent>);
  add("zero", pointwise_rule<Linearity::kAny>);
}

}  // namespace fsdp::internal
