#include "dtensor/strategy/op_schema.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

std::string joined(const std::vector<Placement>& placements) {
  std::string text;
  for (const Placement& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return text;
}

}  // namespace

int64_t Operand::size(int64_t dim) const {
  return shape[static_cast<size_t>(wrapped_dim(dim, ndim()))];
}

int64_t Operand::bytes() const {
  int64_t bytes = dtype.element_size;
  for (const int64_t size : shape) bytes *= size;
  return bytes;
}

int64_t wrapped_dim(int64_t dim, int64_t ndim) {
  const int64_t count = std::max<int64_t>(ndim, 1);
  if (dim < -count || dim >= count) {
    throw std::out_of_range("dimension " + std::to_string(dim) + " is out of range: allowed are " +
                            std::to_string(-count) + " to " + std::to_string(count - 1));
  }
  return dim < 0 ? dim + count : dim;
}

PlacementStrategy replicated_strategy(size_t results, size_t operands) {
  return {.results = std::vector<Placement>(results, Replicate{}),
          .operands = std::vector<Placement>(operands, Replicate{})};
}

std::string to_string(const PlacementStrategy& strategy) {
  return joined(strategy.operands) + " -> " + joined(strategy.results);
}

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
