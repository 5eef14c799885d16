#include "dtensor/strategy/pointwise_ways.h"

#include "dtensor/strategy/broadcast.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<int64_t> broadcast_shape(const CallGeometry& call) {
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
bool fit(const CallGeometry& call, const std::vector<int64_t>& shape) {
  return std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
    return std::equal(operand.shape.rbegin(), operand.shape.rend(), shape.rbegin(),
                      [](int64_t own, int64_t result) { return own == result || own == 1; });
  });
}

Way cut_along(const CallGeometry& call, const std::vector<int64_t>& shape, int64_t dim) {
  Way way{.results = {Shard{dim}}, .operands = {}};
  for (const Operand& operand : call.operands) {
    way.operands.push_back(broadcast_along(operand, static_cast<int64_t>(shape.size()), dim,
                                           shape[static_cast<size_t>(dim)]));
  }
  return way;
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
Way terms_of_one(size_t operands, size_t i, const Placement& terms) {
  Way way = replicated_way(1, operands);
  way.results[0] = terms;
  way.operands[i] = terms;
  return way;
}

void add_terms(size_t operands, Linearity linearity, const Placement& terms,
               std::vector<Way>& ways) {
  if (linearity == Linearity::kSum) {
    ways.push_back({{terms}, std::vector<Placement>(operands, terms)});
    return;
  }
  const size_t count = linearity == Linearity::kProduct ? std::min<size_t>(operands, 2) : 1;
  for (size_t i = 0; i < count; ++i) ways.push_back(terms_of_one(operands, i, terms));
}

}  // namespace

std::vector<Way> pointwise_ways(const CallGeometry& call, Linearity linearity) {
  const auto shape = broadcast_shape(call);
  if (!fit(call, shape)) return {};
  std::vector<Way> ways;
  for (int64_t d = 0; d < static_cast<int64_t>(shape.size()); ++d)
    ways.push_back(cut_along(call, shape, d));
  for (const Partial& partial : partials_of(linearity))
    add_terms(call.operands.size(), linearity, partial, ways);
  return ways;
}

ResultGeometry pointwise_result(const CallGeometry& call) {
  auto shape = broadcast_shape(call);
  const auto model = std::find_if(call.operands.begin(), call.operands.end(),
                                  [&](const Operand& operand) { return operand.shape == shape; });
  if (model == call.operands.end()) return contiguous(std::move(shape));
  return laid_as(std::move(shape), model->stride);
}

OperatorWays pointwise(Linearity linearity) {
  return {.ways = [=](const CallGeometry& call) { return pointwise_ways(call, linearity); },
          .results =
              [](const CallGeometry& call) {
                return std::vector<ResultGeometry>{pointwise_result(call)};
              }};
}

}  // namespace fsdp::internal
