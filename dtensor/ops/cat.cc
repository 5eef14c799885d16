// Joined along another dimension tensors stay cut; along a cut one, blocks come to lie
// behind one another where the cuts go together. Terms stay terms where all parts are.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/view_cuts.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using Op = Partial::Op;

// LibTorch lets an empty vector stand in any list.
bool is_placeholder(const Operand& operand) {
  return operand.shape.size() == 1 && operand.shape[0] == 0;
}

const Operand& model_of(const OpSchema& call) {
  for (const Operand& operand : call.operands) {
    if (!is_placeholder(operand)) return operand;
  }
  return call.operands[0];
}

// All tensors lie as `part`, but for placeholders.
std::vector<Placement> placed_alike(const OpSchema& call, const Placement& part) {
  std::vector<Placement> operands;
  for (const Operand& operand : call.operands)
    operands.push_back(is_placeholder(operand) && part.is_shard() ? Placement(Replicate{}) : part);
  return operands;
}

std::vector<PlacementStrategy> strategies_of_joined_terms(const OpSchema& call) {
  std::vector<PlacementStrategy> strategies;
  for (const Op op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct})
    strategies.push_back({.results = {Partial{op}}, .operands = placed_alike(call, Partial{op})});
  return strategies;
}

// What every tensor is of the joined dimension.
std::vector<Range> joined_ranges(const OpSchema& call, int64_t dim) {
  std::vector<Range> ranges;
  int64_t start = 0;
  for (const Operand& operand : call.operands) {
    const int64_t length = is_placeholder(operand) ? 0 : operand.size(dim);
    ranges.push_back({.start = start, .length = length});
    start += length;
  }
  return ranges;
}

// The strategy by which tensor `i` stays as it is cut along the joined dimension.
std::optional<PlacementStrategy> way_around(const OpSchema& call, const std::vector<Range>& ranges,
                                            size_t i) {
  const int64_t length = ranges.back().start + ranges.back().length;
  const auto whole = cut_around_range(call.arriving[i].shard(), length, ranges[i], call.ranks);
  if (!whole.has_value()) return std::nullopt;
  PlacementStrategy strategy{.results = {*whole}, .operands = {}};
  for (size_t k = 0; k < ranges.size(); ++k) {
    if (is_placeholder(call.operands[k])) {
      strategy.operands.emplace_back(Replicate{});
      continue;
    }
    const auto part = cut_of_range(*whole, length, ranges[k], call.ranks);
    if (!part.has_value()) return std::nullopt;
    strategy.operands.emplace_back(*part);
  }
  return strategy;
}

// cat(tensors, dim)
std::vector<PlacementStrategy> cat_strategy(const OpSchema& call) {
  const Operand& model = model_of(call);
  const int64_t dim = wrapped_dim(call.number(1), model.ndim());
  auto strategies = strategies_of_joined_terms(call);
  for (int64_t d = 0; d < model.ndim(); ++d) {
    if (d != dim)
      strategies.push_back({.results = {Shard{d}}, .operands = placed_alike(call, Shard{d})});
  }
  const auto ranges = joined_ranges(call, dim);
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (!call.arriving[i].is_shard(dim) || is_placeholder(call.operands[i])) continue;
    if (const auto strategy = way_around(call, ranges, i)) strategies.push_back(*strategy);
  }
  return strategies;
}

// stack(tensors, dim): along a new dimension.
std::vector<PlacementStrategy> stack_strategy(const OpSchema& call) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t dim = wrapped_dim(call.number(1), ndim + 1);
  auto strategies = strategies_of_joined_terms(call);
  for (int64_t d = 0; d < ndim; ++d) {
    strategies.push_back({.results = {Shard{d < dim ? d : d + 1}},
                          .operands = std::vector<Placement>(call.operands.size(), Shard{d})});
  }
  return strategies;
}

}  // namespace

void add_cat(OpTable& table) {
  table.add("cat.", {.strategy = {.strategies = cat_strategy}});
  table.add("stack.", {.strategy = {.strategies = stack_strategy}});
}

}  // namespace fsdp::internal
