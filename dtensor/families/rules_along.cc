// Operators along a dimension that keep the shape, or all of it but that dimension:
// cumsum, sort, topk, flip, tril. Every operand lies as the result, with that
// dimension whole.
#include "dtensor/families/pointwise.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/whole_dims.h"

#include <c10/core/WrapDimMinimal.h>

#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<int64_t> every_dim(int64_t ndim) {
  std::vector<int64_t> dims(static_cast<size_t>(ndim));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

// The `dim` or `dims` argument; all dimensions when it is empty.
std::vector<int64_t> given_dims(OperatorCall& call, int64_t ndim) {
  c10::IValue* argument = call.find_argument("dim");
  if (argument == nullptr) argument = call.find_argument("dims");
  std::vector<int64_t> dims;
  if (argument->isInt()) dims = {argument->toInt()};
  if (argument->isIntList()) dims = argument->toIntVector();
  for (int64_t& dim : dims) dim = c10::maybe_wrap_dim(dim, ndim);
  return dims.empty() ? every_dim(ndim) : dims;
}

void run_along(OperatorCall& call, const std::vector<int64_t>& dims) {
  const PointwiseOperands operands(call);
  auto plan = plan_pointwise({call, operands.tensors, operands.written, Linearity::kNone});
  check_whole_dims(call, *plan.result, dims);
  run_pointwise(call, operands, std::move(plan));
}

void along_rule(OperatorCall& call) {
  run_along(call, given_dims(call, call.argument(0).toTensor().dim()));
}

// tril, triu: both dimensions of the matrices.
void along_matrix_rule(OperatorCall& call) {
  const int64_t ndim = call.argument(0).toTensor().dim();
  run_along(call, {ndim - 2, ndim - 1});
}

// The dimension becomes k elements long.
void topk_rule(OperatorCall& call) {
  const at::Tensor given = call.argument(0).toTensor();
  const at::Tensor self = reduce_partials(given);
  const auto dims = given_dims(call, self.dim());
  check_whole_dims(call, *spec_of(self), dims);
  auto shape = self.sizes().vec();
  if (self.dim() > 0) shape[static_cast<size_t>(dims[0])] = call.find_argument("k")->toInt();
  call.argument(0) = local_of(self);
  auto results = call.run();
  const auto interned = intern_spec(spec_of(self)->with_shape(std::move(shape)));
  for (auto& result : results) result = make_dtensor(result.toTensor(), interned);
  call.finish(std::move(results));
}

}  // namespace

void add_along_rules(RuleTable& table) {
  for (const char* name : {"cumsum", "cumprod"}) add_with_in_place(table, name, along_rule);
  for (const char* name :
       {"logcumsumexp", "cummax", "cummin", "sort.", "sort.stable", "flip", "roll"}) {
    table[name] = along_rule;
  }
  for (const char* name : {"tril", "triu"}) add_with_in_place(table, name, along_matrix_rule);
  table["topk."] = topk_rule;
}

}  // namespace fsdp::internal
