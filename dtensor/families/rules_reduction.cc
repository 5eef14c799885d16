// Reductions. Over a cut dimension each rank reduces its part and the result is Partial:
// nothing is sent until somebody needs the value. A rank with an empty part contributes
// the neutral element.
#include "dtensor/families/reduction.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fsdp::internal {
namespace {

// Partial sums and averages pass through sums and means; other Partials are reduced
// first.
at::Tensor linear_terms(const at::Tensor& self) {
  auto placements = spec_of(self).placements();
  for (auto& placement : placements) {
    if (!placement.is_partial()) continue;
    const bool linear =
        placement.partial_op() == Partial::Op::kSum || placement.partial_op() == Partial::Op::kAvg;
    if (!linear) placement = Replicate{};
  }
  return redistribute_dtensor(self, placements);
}

c10::Scalar lowest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return false;
  if (c10::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amax", [] { return c10::Scalar(std::numeric_limits<scalar_t>::lowest()); });
}

c10::Scalar highest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return true;
  if (c10::isFloatingType(type)) return std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amin", [] { return c10::Scalar(std::numeric_limits<scalar_t>::max()); });
}

void finish_reduced(OperatorCall& call, const at::Tensor& local, const DTensorSpec& spec,
                    const ReducedDims& dims, Partial::Op across) {
  call.finish(make_dtensor(local, reduced_spec(spec, dims, Partial{across})));
}

// The operator itself on the local part; it knows its neutral element. A linear one takes
// terms of a sum one by one.
template <Partial::Op across, bool is_linear = false>
void reduction_rule(OperatorCall& call) {
  const at::Tensor given = call.argument(0).toTensor();
  const at::Tensor self = is_linear ? linear_terms(given) : reduce_partials(given);
  const auto dims = ReducedDims::of(call, self);
  call.argument(0) = local_of(self);
  auto results = call.run();
  finish_reduced(call, results[0].toTensor(), spec_of(self), dims, across);
}

void mean_rule(OperatorCall& call) {
  const at::Tensor self = linear_terms(call.argument(0).toTensor());
  const auto dims = ReducedDims::of(call, self);
  if (!crosses_ranks(spec_of(self), dims)) {
    call.argument(0) = local_of(self);
    auto results = call.run();
    return finish_reduced(call, results[0].toTensor(), spec_of(self), dims, Partial::Op::kSum);
  }
  const c10::IValue* dtype = call.find_argument("dtype");
  auto type = dtype->isNone() ? self.scalar_type() : dtype->toScalarType();
  TORCH_CHECK(c10::isFloatingType(type), call.description(),
              ": mean needs a floating-point dtype, got ", type);
  at::Tensor local = at::sum(local_of(self), dims.dims, dims.keepdim, type);
  local.div_(dims.count(self.sizes()));
  finish_reduced(call, local, spec_of(self), dims, Partial::Op::kSum);
}

// amax, amin and the full max and min, which refuse to reduce nothing.
template <Partial::Op across>
void extremum_rule(OperatorCall& call) {
  const at::Tensor self = reduce_partials(call.argument(0).toTensor());
  const auto dims = ReducedDims::of(call, self);
  const at::Tensor& local = local_of(self);
  if (dims.count(local.sizes()) == 0 && dims.count(self.sizes()) > 0) {
    const auto neutral =
        across == Partial::Op::kMax ? lowest(local.scalar_type()) : highest(local.scalar_type());
    const at::Tensor result = at::full(dims.shape_after(local.sizes()), neutral, local.options());
    return finish_reduced(call, result, spec_of(self), dims, across);
  }
  call.argument(0) = local;
  auto results = call.run();
  finish_reduced(call, results[0].toTensor(), spec_of(self), dims, across);
}

void aminmax_rule(OperatorCall& call) {
  const at::Tensor self = reduce_partials(call.argument(0).toTensor());
  const auto dims = ReducedDims::of(call, self);
  const at::Tensor lowest = at::amin(self, dims.dims, dims.keepdim);
  const at::Tensor highest = at::amax(self, dims.dims, dims.keepdim);
  call.finish(std::vector<c10::IValue>{lowest, highest});
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  for (const char* name : {"sum.", "sum.dim_IntList"})
    table[name] = reduction_rule<Partial::Op::kSum, true>;
  for (const char* name : {"nansum.", "count_nonzero.", "count_nonzero.dim_IntList"}) {
    table[name] = reduction_rule<Partial::Op::kSum>;
  }
  for (const char* name : {"prod.", "prod.dim_int"})
    table[name] = reduction_rule<Partial::Op::kProduct>;
  for (const char* name : {"any.", "any.dim", "any.dims"})
    table[name] = reduction_rule<Partial::Op::kMax>;
  for (const char* name : {"all.", "all.dim", "all.dims"})
    table[name] = reduction_rule<Partial::Op::kMin>;
  for (const char* name : {"mean.", "mean.dim"}) table[name] = mean_rule;
  for (const char* name : {"max.", "amax."}) table[name] = extremum_rule<Partial::Op::kMax>;
  for (const char* name : {"min.", "amin."}) table[name] = extremum_rule<Partial::Op::kMin>;
  table["aminmax."] = aminmax_rule;
}

}  // namespace fsdp::internal
