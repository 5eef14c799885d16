// Cut along another dimension, they work on parts. Along a dimension that is cut the
// ranks exchange the maximum of each row and the sum of its exponentials, and nothing is
// gathered. Their gradients add up one number per row. (Milakov and Gimelshein, Online
// normalizer calculation for softmax, 2018, has how such sums are joined.)
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/row_statistics.h"
#include "dtensor/strategy/whole_dim_strategy.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/stack.h>

#include <limits>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();

// All operands and the result cut along the dimension that argument `place` names.
template <size_t place>
std::vector<PlacementStrategy> cut_rows_strategy(const OpSchema& call) {
  const Operand& self = call.operands[0];
  if (self.ndim() == 0) return {};
  const Placement cut = Shard{wrapped_dim(call.number(place), self.ndim())};
  return {{.results = {cut},
           .operands = std::vector<Placement>(call.operands.size(), cut),
           .asks_other_ranks = true}};
}

// What is known of every row: its maximum, and the sum of exp(value - maximum).
struct RowSums {
  at::Tensor maximum, sum;  // one element along the row's dimension
};

at::Tensor exp_from(const at::Tensor& values, const at::Tensor& maximum) {
  return values.sub(maximum.masked_fill(maximum.eq(kLowest), 0)).exp_();
}

RowSums sums_of(const at::Tensor& part, int64_t dim) {
  auto shape = part.sizes().vec();
  shape[static_cast<size_t>(dim)] = 1;
  if (part.size(dim) == 0) return {part.new_full(shape, kLowest), part.new_zeros(shape)};
  const at::Tensor maximum = part.amax(dim, /*keepdim=*/true);
  return {maximum, exp_from(part, maximum).sum(dim, /*keepdim=*/true)};
}

// Collective over the mesh dimensions that cut the rows: one all-gather each, of two
// numbers per row.
RowSums joined(RowSums own, const DTensorSpec& spec, int64_t dim) {
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!cuts_one_of(spec, m, {dim})) continue;
    const at::Tensor all = gathered_across(at::stack({own.maximum, own.sum}), spec.mesh(), m);
    const at::Tensor maxima = all.select(1, 0), sums = all.select(1, 1);
    own.maximum = maxima.amax(0);
    own.sum = exp_from(maxima, own.maximum).mul_(sums).sum(0);
  }
  return own;
}

// As LibTorch's kernels sum: 16-bit types in 32 bits.
at::Tensor as_summed(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

// _softmax(self, dim, half_to_float), and with `is_log` _log_softmax.
template <bool is_log>
std::vector<c10::IValue> run_on_cut_rows(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec spec = placed.operand(0);
  const at::Tensor self = call.argument(0).toTensor();
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), self.dim());
  if (self.dim() == 0 || !spec.is_cut(dim)) return call.run();
  const at::Tensor part = as_summed(self);
  const RowSums rows = joined(sums_of(part, dim), spec, dim);
  const at::Tensor shifted = part.sub(rows.maximum);
  const at::Tensor result = is_log ? shifted.sub(rows.sum.log()) : shifted.exp().div(rows.sum);
  const bool stays_float = call.argument(2).toBool();
  return {stays_float ? result : result.to(self.scalar_type())};
}

// _softmax_backward_data(grad_output, output, dim, input_dtype), and with `is_log`
// _log_softmax_backward_data.
template <bool is_log>
std::vector<c10::IValue> run_backward_on_cut_rows(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec spec = placed.operand(0);
  const auto ndim = static_cast<int64_t>(spec.shape().size());
  const int64_t dim = wrapped_dim(call.argument(2).toInt(), ndim);
  if (ndim == 0 || !spec.is_cut(dim)) return call.run();
  const at::Tensor grad = as_summed(call.argument(0).toTensor());
  const at::Tensor output = as_summed(call.argument(1).toTensor());
  const at::Tensor terms = is_log ? grad : grad.mul(output);
  const at::Tensor sum = summed_across(terms.sum(dim, /*keepdim=*/true), spec, {dim});
  const at::Tensor result = is_log ? grad.sub(output.exp().mul_(sum)) : output.mul(grad.sub(sum));
  return {result.to(call.argument(3).toScalarType())};
}

// `place`: of the argument that names the dimension.
template <size_t place>
OpEntry along_rows(const LocalKernel& local_kernel) {
  return {.strategy = with_more_strategies(along(kept<place>), cut_rows_strategy<place>),
          .local_kernel = std::move(local_kernel)};
}

}  // namespace

void add_softmax(OpTable& table) {
  table.add("_softmax.", along_rows<1>(run_on_cut_rows<false>));
  table.add("_log_softmax.", along_rows<1>(run_on_cut_rows<true>));
  table.add("_safe_softmax.", {.strategy = along(kept<1>)});
  table.add("_softmax_backward_data.", along_rows<2>(run_backward_on_cut_rows<false>));
  table.add("_log_softmax_backward_data.", along_rows<2>(run_backward_on_cut_rows<true>));
}

}  // namespace fsdp::internal
