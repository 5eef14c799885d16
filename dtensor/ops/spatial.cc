// Pooling and interpolation work on the last dimensions, the planes: the batch and the
// channels may be cut. LibTorch's kernels take an empty batch, but not empty channels.
#include "dtensor/ops/op_table.h"

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// All tensors are [batch, channels, planes...], or without the batch.
std::vector<PlacementStrategy> plane_strategy(const OpSchema& call, int64_t planes,
                                              size_t results) {
  const int64_t leading = call.operands[0].ndim() - planes;
  if (leading > 2) return {};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < leading; ++d) {
    const bool is_batch = leading == 2 && d == 0;
    strategies.push_back({.results = std::vector<Placement>(results, Shard{d}),
                          .operands = std::vector<Placement>(call.operands.size(), Shard{d}),
                          .takes_empty_parts = is_batch});
  }
  return strategies;
}

StrategyFunction on_planes(int64_t planes, size_t results = 1) {
  return [=](const OpSchema& call) { return plane_strategy(call, planes, results); };
}

// pool_backward(grad, self, ...)
std::vector<ResultGeometry> as_pooled(const OpSchema& call) {
  const Operand& self = call.operands[1];
  return {laid_as(self.shape, self.stride)};
}

// _adaptive_avg_pool(self, output_size)
std::vector<ResultGeometry> adaptive_results(const OpSchema& call) {
  auto shape = call.operands[0].shape;
  const auto& planes = call.numbers(1);
  if (planes.size() <= shape.size()) std::copy(planes.rbegin(), planes.rend(), shape.rbegin());
  return {laid_as(std::move(shape), call.operands[0].stride)};
}

void add_pooling(OpTable& table, int64_t planes) {
  const std::string n = std::to_string(planes) + "d";
  const OpEntry backward{.strategy = {.strategies = on_planes(planes), .results = as_pooled}};
  for (const std::string& name : {"adaptive_max_pool" + n, "avg_pool" + n}) {
    const size_t results = name.starts_with("avg") ? 1 : 2;  // indices too
    table.add(name + ".", {.strategy = {.strategies = on_planes(planes, results)}});
    table.add(name + "_backward.", backward);
  }
  table.add("_adaptive_avg_pool" + n + ".",
            {.strategy = {.strategies = on_planes(planes), .results = adaptive_results}});
  table.add("_adaptive_avg_pool" + n + "_backward.", backward);
}

// upsample_backward(grad, output_size, input_size, ...)
std::vector<PartArgument> part_of_input_size(const OpSchema& /*call*/, const PlacedCall& placed) {
  return {{2, placed.results[0].local_shape(placed.coordinate)}};
}

void add_interpolation(OpTable& table, const std::string& name, int64_t planes) {
  table.add(name + ".", {.strategy = {.strategies = on_planes(planes)}});
  table.add(name + "_backward.",
            {.strategy = {.strategies = on_planes(planes), .part_arguments = part_of_input_size}});
}

}  // namespace

void add_spatial(OpTable& table) {
  add_pooling(table, 2);
  add_pooling(table, 3);
  table.add("max_pool2d_with_indices.", {.strategy = {.strategies = on_planes(2, 2)}});
  table.add("max_pool2d_with_indices_backward.",
            {.strategy = {.strategies = on_planes(2), .results = as_pooled}});
  for (const char* name : {"upsample_nearest", "_upsample_nearest_exact"}) {
    for (int64_t planes = 1; planes <= 3; ++planes)
      add_interpolation(table, name + std::to_string(planes) + "d", planes);
  }
  add_interpolation(table, "upsample_linear1d", 1);
  for (const char* name : {"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
                           "_upsample_bicubic2d_aa"})
    add_interpolation(table, name, 2);
  add_interpolation(table, "upsample_trilinear3d", 3);
}

}  // namespace fsdp::internal
