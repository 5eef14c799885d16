#include "dtensor/strategy/whole_dim_strategy.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_among(int64_t dim, const Along& along) {
  return std::find(along.dims.begin(), along.dims.end(), dim) != along.dims.end();
}

int64_t dim_after(int64_t dim, const Along& along) {
  if (along.then != Along::Then::kGo) return dim;
  return dim - std::count_if(along.dims.begin(), along.dims.end(),
                             [dim](int64_t gone) { return gone < dim; });
}

std::vector<int64_t> every_dim(int64_t ndim) {
  std::vector<int64_t> dims(static_cast<size_t>(ndim));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

}  // namespace

std::vector<int64_t> given_dims(const PlainArgument& argument, int64_t ndim) {
  std::vector<int64_t> dims;
  if (const auto* const dim = std::get_if<int64_t>(&argument)) dims = {*dim};
  if (const auto* const list = std::get_if<std::vector<int64_t>>(&argument)) dims = *list;
  for (int64_t& dim : dims) dim = wrapped_dim(dim, ndim);
  return dims.empty() ? every_dim(ndim) : dims;
}

std::vector<int64_t> given_dims(const OpSchema& call, size_t place) {
  return given_dims(call.plain[place], call.operands[0].ndim());
}

Along all_reduced(const OpSchema& call) {
  return {.dims = every_dim(call.operands[0].ndim()), .then = Along::Then::kGo};
}

std::vector<PlacementStrategy> along_strategy(const OpSchema& call, const Along& along,
                                              size_t results) {
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (is_among(d, along)) continue;
    strategies.push_back({.results = std::vector<Placement>(results, Shard{dim_after(d, along)}),
                          .operands = std::vector<Placement>(call.operands.size(), Shard{d})});
  }
  return strategies;
}

OpStrategy along(AlongOf of, size_t results) {
  return {
      .strategies = [=](const OpSchema& call) { return along_strategy(call, of(call), results); },
      .results =
          [=](const OpSchema& call) {
            return std::vector<ResultGeometry>(results, along_result(call, of(call)));
          }};
}

ResultGeometry along_result(const OpSchema& call, const Along& along) {
  const Operand& self = call.operands[0];
  if (along.then == Along::Then::kStay) return laid_as(self.shape, self.stride);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (!is_among(d, along)) shape.push_back(self.size(d));
    if (is_among(d, along) && along.then == Along::Then::kBecomeOne) shape.push_back(1);
  }
  return contiguous(std::move(shape));
}

}  // namespace fsdp::internal
