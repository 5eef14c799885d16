// Operands are cut alike, but those that are repeated. Whether terms have to be reduced
// first depends on the operator, and for masked_fill and add on a number too.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

namespace fsdp::internal {
namespace {

// Operators that need whole operands.
constexpr const char* kNotLinear[] = {"abs",
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

// masked_fill(self, mask, value): zeros can be filled in term by term.
std::vector<PlacementStrategy> masked_fill_strategy(const OpSchema& call) {
  const double* const value = call.real(2);
  const bool fills_zero = value != nullptr && *value == 0;
  return pointwise_strategy(call, fills_zero ? Linearity::kScale : Linearity::kNone);
}

// add(self, number, alpha): to terms the number is one term more, as a tensor would be,
// which is what the composite kernel makes of it.
void add_number(OperatorCall& call, const StrategyKernel* by_strategy) {
  if (spec_of(call.argument(0).toTensor()).has_partial()) return call.decompose();
  by_strategy->run(call);
}

// What optimizers call once per parameter and step.
void add_unboxed_pointwise(OpTable& table) {
  for (const char* name :
       {"add.Tensor", "add_.Tensor", "add_.Scalar", "sub_.Tensor", "mul.Tensor", "mul.Scalar",
        "mul_.Tensor", "mul_.Scalar", "div.Tensor", "div.Scalar", "div_.Tensor", "div_.Scalar",
        "addcmul_.", "addcdiv_.", "lerp_.Scalar", "sqrt."})
    table.add_unboxed(name);
}

}  // namespace

void add_pointwise(OpTable& table) {
  const OpEntry not_linear{.strategy = pointwise(Linearity::kNone)};
  for (const char* name : kNotLinear) table.add_with_in_place(name, not_linear);
  for (const char* name : {"neg", "positive"})
    table.add_with_in_place(name, {.strategy = pointwise(Linearity::kUnary)});
  for (const char* name : {"add", "sub"})
    table.add_with_in_place(name, {.strategy = pointwise(Linearity::kSum)});
  for (const char* name : {"add.Scalar", "add_.Scalar", "sub.Scalar", "sub_.Scalar", "rsub.Scalar"})
    table.add(name, {.strategy = pointwise(Linearity::kNone), .handler = add_number});
  for (const char* name : {"add.Scalar_out", "sub.Scalar_out"}) table.add(name, not_linear);
  table.add_with_in_place("mul", {.strategy = pointwise(Linearity::kProduct)});
  table.add_with_in_place("mul.Scalar", {.strategy = pointwise(Linearity::kScale)});
  table.add("mul.Scalar_out", {.strategy = pointwise(Linearity::kScale)});
  table.add_with_in_place("div", {.strategy = pointwise(Linearity::kScale)});
  auto masked_fill = pointwise(Linearity::kNone);
  masked_fill.strategies = masked_fill_strategy;
  masked_fill.reals = {2};
  table.add_with_in_place("masked_fill.Scalar", {.strategy = masked_fill});
  table.add_with_in_place("fill",
                          {.strategy = pointwise(Linearity::kIdempotent), .overwrites = true});
  table.add_with_in_place("zero", {.strategy = pointwise(Linearity::kAny), .overwrites = true});
  add_unboxed_pointwise(table);
}

}  // namespace fsdp::internal
