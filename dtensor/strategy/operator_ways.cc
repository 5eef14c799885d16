#include "dtensor/strategy/operator_ways.h"

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

OperatorWays with_more_ways(const OperatorWays& known, const WaysOf& more) {
  const WaysOf first = known.ways;
  OperatorWays both = known;
  both.ways = [first, more](const CallGeometry& call) {
    auto ways = first(call);
    for (Way& way : more(call)) ways.push_back(std::move(way));
    return ways;
  };
  return both;
}

}  // namespace fsdp::internal
