// Elementwise operators, functional, in-place and out=.
#include "dtensor/dtensor.h"
#include "dtensor/families/pointwise.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_partial(const Placement& placement) { return placement.is_partial(); }

// Whether every DTensor among the arguments has the same spec, without Partial, and every
// other tensor is a number: the operator can then run where the arguments stand. The
// common case, kept free of allocations.
bool lies_alike(const OperatorCall& call) {
  const DTensorSpec* common = nullptr;
  for (size_t i = 0; i < call.argument_count(); ++i) {
    if (!call.argument(i).isTensor()) continue;
    const at::Tensor& tensor = call.argument(i).toTensor();
    if (!is_dtensor(tensor)) {
      if (tensor.defined() && tensor.dim() > 0) return false;
      continue;
    }
    const DTensorSpec* spec = spec_of(tensor).get();
    if (common != nullptr && common != spec) return false;
    common = spec;
  }
  return common != nullptr &&
         std::none_of(common->placements.begin(), common->placements.end(), is_partial);
}

void localize_arguments(OperatorCall& call) {
  for (size_t i = 0; i < call.argument_count(); ++i) {
    c10::IValue& argument = call.argument(i);
    if (argument.isTensor() && is_dtensor(argument.toTensor()))
      argument = local_of(argument.toTensor());
  }
}

// The first DTensor, if it lies in memory without gaps.
const at::Tensor* find_dense(const OperatorCall& call) {
  for (size_t i = 0; i < call.argument_count(); ++i) {
    if (!call.argument(i).isTensor() || !is_dtensor(call.argument(i).toTensor())) continue;
    const at::Tensor& tensor = call.argument(i).toTensor();
    return tensor.is_non_overlapping_and_dense() ? &tensor : nullptr;
  }
  return nullptr;
}

// True when it could: an operator that writes one DTensor, hands it back, and needs
// nothing moved.
bool run_in_place(OperatorCall& call) {
  const OperatorTraits& traits = call.traits();
  if (traits.written.size() != 1 || traits.returned_argument.size() != 1) return false;
  const c10::IValue& written = call.argument(traits.written[0]);
  if (!written.isTensor() || !is_dtensor(written.toTensor()) || !lies_alike(call)) return false;
  at::Tensor self = written.toTensor();
  localize_arguments(call);
  call.run_in_place();
  call.result(0) = std::move(self);
  return true;
}

// The same for an operator that writes nothing and has one result.
bool run_alike(OperatorCall& call) {
  const OperatorTraits& traits = call.traits();
  if (!traits.written.empty() || traits.returned_argument.size() != 1 || !lies_alike(call))
    return false;
  const auto* const model = find_dense(call);
  if (model == nullptr) return false;
  DTensorSpecPtr spec = spec_of(*model);
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
                                  "hardswish",
                                  "hardtanh",
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
                                  "lt",
                                  "masked_fill",
                                  "maximum",
                                  "minimum",
                                  "mish",
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
  for (const char* name : {"mul", "div"}) add(name, pointwise_rule<Linearity::kScale>);
  add("fill", pointwise_rule<Linearity::kIdempotent>);
  add("zero", pointwise_rule<Linearity::kAny>);
}

}  // namespace fsdp::internal
