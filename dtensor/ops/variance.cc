// Along a cut dimension in two passes: the mean, of which every rank needs the whole,
// then the squared distances. Each is one all-reduce of a number per row.
#include "dtensor/ops/op_table.h"
#include "dtensor/ops/row_statistics.h"
#include "dtensor/strategy/whole_dim_strategy.h"

#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// var(self, dim, correction, keepdim) and its like.
Along variance_along(const OpSchema& call) {
  const bool keepdim = call.number(3) != 0;
  return {.dims = given_dims(call, 1),
          .then = keepdim ? Along::Then::kBecomeOne : Along::Then::kGo};
}

// The ranks of a cut row agree on its numbers.
OpStrategy variance_strategy(size_t results) {
  return {.strategies =
              [=](const OpSchema& call) {
                const Along along = variance_along(call);
                auto strategies = along_strategy(call, along, results);
                const std::vector<Placement> whole(results, Replicate{});
                for (const int64_t dim : along.dims) {
                  strategies.push_back(
                      {.results = whole, .operands = {Shard{dim}}, .asks_other_ranks = true});
                }
                return strategies;
              },
          .results =
              [=](const OpSchema& call) {
                return std::vector<ResultGeometry>(results,
                                                   along_result(call, variance_along(call)));
              }};
}

struct Moments {
  at::Tensor mean, variance;
};

Moments moments(const OperatorCall& call, const DTensorSpec& self,
                const std::vector<int64_t>& dims) {
  const at::Tensor local = call.argument(0).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(!local.is_complex(), call.name(), " on DTensor of ", to_string(self),
                              ": complex numbers over a dimension that is cut across ranks. Call "
                              ".redistribute({Replicate()}) first (collective).");
  double count = 1;
  for (const int64_t dim : dims)
    count *= static_cast<double>(self.shape()[static_cast<size_t>(dim)]);
  const bool keepdim = call.argument(3).toBool();
  const at::Tensor mean =
      summed_across(at::sum(local, dims, /*keepdim=*/true), self, dims).div_(count);
  const at::Tensor squares =
      summed_across(at::sum(local.sub(mean).square(), dims, keepdim), self, dims);
  const c10::IValue& given = call.argument(2);
  const double correction = given.isNone() ? 1.0 : given.toScalar().toDouble();
  return {.mean = mean.view(squares.sizes()),
          .variance = squares.div(std::max(0.0, count - correction))};
}

template <bool is_deviation, bool with_mean>
std::vector<c10::IValue> variance_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec self = placed.operand(0);
  const auto dims =
      given_dims(plain_argument(call.argument(1)), static_cast<int64_t>(self.shape().size()));
  const bool is_cut =
      std::any_of(dims.begin(), dims.end(), [&](int64_t dim) { return self.is_cut(dim); });
  if (!is_cut) return call.run();
  const auto [mean, variance] = moments(call, self, dims);
  std::vector<c10::IValue> results{is_deviation ? variance.sqrt() : variance};
  if (with_mean) results.emplace_back(mean);
  return results;
}

}  // namespace

void add_variance(OpTable& table) {
  table.add("var.correction",
            {.strategy = variance_strategy(1), .local_kernel = variance_of_part<false, false>});
  table.add("std.correction",
            {.strategy = variance_strategy(1), .local_kernel = variance_of_part<true, false>});
  table.add("var_mean.correction",
            {.strategy = variance_strategy(2), .local_kernel = variance_of_part<false, true>});
  table.add("std_mean.correction",
            {.strategy = variance_strategy(2), .local_kernel = variance_of_part<true, true>});
}

}  // namespace fsdp::internal
