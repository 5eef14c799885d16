// Layer norms fit where a dimension that is not normalised is cut, statistics and all;
// the gradients of weight and bias are then terms of sums over it.
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

// Dimensions of `input` before those that are normalised.
int64_t leading_dims(const OpSchema& call, const Operand& input, size_t normalized_shape) {
  return input.ndim() - static_cast<int64_t>(call.numbers(normalized_shape).size());
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> result, mean, rstd.
std::vector<PlacementStrategy> layer_norm_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < leading_dims(call, call.operands[0], 1); ++d) {
    const Placement cut = Shard{d};
    strategies.push_back({{cut, cut, cut}, {cut, whole, whole}});
  }
  return strategies;
}

std::vector<ResultGeometry> layer_norm_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  auto statistics = input.shape;
  std::fill(statistics.begin() + leading_dims(call, input, 1), statistics.end(), 1);
  return {contiguous(input.shape), contiguous(statistics), contiguous(statistics)};
}

// native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight, bias,
// mask) -> gradients of input, weight and bias.
std::vector<PlacementStrategy> layer_norm_backward_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < leading_dims(call, call.operands[1], 2); ++d) {
    const Placement cut = Shard{d};
    strategies.push_back({{cut, terms, terms}, {cut, cut, cut, cut, whole, whole}});
  }
  return strategies;
}

std::vector<ResultGeometry> layer_norm_backward_results(const OpSchema& call) {
  return {contiguous(call.operands[1].shape), contiguous(call.numbers(2)),
          contiguous(call.numbers(2))};
}

}  // namespace

void add_layer_norm(OpTable& table) {
  table.add("native_layer_norm.",
            {.strategy = {.strategies = layer_norm_strategy, .results = layer_norm_results}});
  table.add("native_layer_norm_backward.", {.strategy = {.strategies = layer_norm_backward_strategy,
                                                         .results = layer_norm_backward_results}});
}

}  // namespace fsdp::internal
