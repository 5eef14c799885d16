#include "dtensor/strategy/op_strategy.h"

#include "dtensor/layout/shard_layout.h"

#include <utility>

namespace fsdp::internal {

ResultGeometry contiguous(std::vector<int64_t> shape) {
  auto stride = contiguous_strides(shape);
  return {.shape = std::move(shape), .stride = std::move(stride)};
}

ResultGeometry laid_as(std::vector<int64_t> shape, const std::vector<int64_t>& stride) {
  auto dense = dense_strides(shape, stride);
  return {.shape = std::move(shape), .stride = std::move(dense)};
}

ResultGeometry transposed(std::vector<int64_t> shape, size_t a, size_t b) {
  auto in_memory = shape;
  std::swap(in_memory[a], in_memory[b]);
  auto stride = contiguous_strides(in_memory);
  std::swap(stride[a], stride[b]);
  return {.shape = std::move(shape), .stride = std::move(stride)};
}

OpStrategy with_more_strategies(const OpStrategy& known, const StrategyFunction& more) {
  const StrategyFunction first = known.strategies;
  OpStrategy both = known;
  both.strategies = [first, more](const OpSchema& call) {
    auto strategies = first(call);
    for (PlacementStrategy& strategy : more(call)) strategies.push_back(std::move(strategy));
    return strategies;
  };
  return both;
}

}  // namespace fsdp::internal
