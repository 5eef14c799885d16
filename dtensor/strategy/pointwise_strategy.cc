#include "dtensor/strategy/pointwise_strategy.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<int64_t> broadcast_shape(const OpSchema& call) {
  std::vector<int64_t> shape;
  for (const Operand& operand : call.operands) {
    if (operand.shape.size() > shape.size())
      shape.insert(shape.begin(), operand.shape.size() - shape.size(), 1);
    for (size_t d = 1; d <= operand.shape.size(); ++d) {
      const int64_t size = operand.shape[operand.shape.size() - d];
      if (size != 1) shape[shape.size() - d] = size;
    }
  }
  return shape;
}

// Whether every operand has the result's size along each of its dimensions, or 1.
bool fit(const OpSchema& call, const std::vector<int64_t>& shape) {
  return std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
    return std::equal(operand.shape.rbegin(), operand.shape.rend(), shape.rbegin(),
                      [](int64_t own, int64_t result) { return own == result || own == 1; });
  });
}

PlacementStrategy cut_along(const OpSchema& call, const std::vector<int64_t>& shape, int64_t dim) {
  PlacementStrategy strategy{.results = {Shard{dim}}, .operands = {}};
  for (const Operand& operand : call.operands) {
    strategy.operands.push_back(broadcast_along(operand, static_cast<int64_t>(shape.size()), dim,
                                                shape[static_cast<size_t>(dim)]));
  }
  return strategy;
}

std::vector<Partial> partials_of(Linearity linearity) {
  using Op = Partial::Op;
  switch (linearity) {
    case Linearity::kNone:
      return {};
    case Linearity::kAny:
      return {{Op::kSum}, {Op::kAvg}, {Op::kMin}, {Op::kMax}, {Op::kProduct}};
    case Linearity::kIdempotent:
      return {{Op::kAvg}, {Op::kMin}, {Op::kMax}};
    default:
      return {{Op::kSum}, {Op::kAvg}};
  }
}

// Only operand `i` is terms.
PlacementStrategy terms_of_one(size_t operands, size_t i, const Placement& terms) {
  PlacementStrategy strategy = replicated_strategy(1, operands);
  strategy.results[0] = terms;
  strategy.operands[i] = terms;
  return strategy;
}

void add_terms(size_t operands, Linearity linearity, const Placement& terms,
               std::vector<PlacementStrategy>& strategies) {
  if (linearity == Linearity::kSum) {
    strategies.push_back({{terms}, std::vector<Placement>(operands, terms)});
    return;
  }
  const size_t count = linearity == Linearity::kProduct ? std::min<size_t>(operands, 2) : 1;
  for (size_t i = 0; i < count; ++i) strategies.push_back(terms_of_one(operands, i, terms));
}

}  // namespace

std::vector<PlacementStrategy> pointwise_strategy(const OpSchema& call, Linearity linearity) {
  const auto shape = broadcast_shape(call);
  if (!fit(call, shape)) return {};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < static_cast<int64_t>(shape.size()); ++d)
    strategies.push_back(cut_along(call, shape, d));
  for (const Partial& partial : partials_of(linearity))
    add_terms(call.operands.size(), linearity, partial, strategies);
  return strategies;
}

ResultGeometry pointwise_result(const OpSchema& call) {
  auto shape = broadcast_shape(call);
  const auto model = std::find_if(call.operands.begin(), call.operands.end(),
                                  [&](const Operand& operand) { return operand.shape == shape; });
  if (model == call.operands.end()) return contiguous(std::move(shape));
  return laid_as(std::move(shape), model->stride);
}

OpStrategy pointwise(Linearity linearity) {
  return {
      .strategies = [=](const OpSchema& call) { return pointwise_strategy(call, linearity); },
      .results =
          [](const OpSchema& call) { return std::vector<ResultGeometry>{pointwise_result(call)}; }};
}

Placement broadcast_along(const Operand& operand, int64_t ndim, int64_t dim, int64_t size) {
  const int64_t own = dim - (ndim - operand.ndim());
  if (!operand.is_present() || own < 0 || operand.size(own) != size) return Replicate{};
  return Shard{own};
}

}  // namespace fsdp::internal
