// glu(self, dim) halves a dimension. Where one that is cut has both halves cut alike, as
// the columns of a packed up-projection are, each rank has parts that belong together.
#include "dtensor/ways/along_ways.h"
#include "dtensor/ways/table.h"

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// The dimension that is halved; `self` and `dim` say which operand and argument.
int64_t halved_dim(const CallGeometry& call, size_t self, size_t dim) {
  return wrapped_dim(call.number(dim), call.operands[self].ndim());
}

// How each half is cut where the whole is cut so; none where they are not cut alike.
std::optional<Placement> cut_of_halves(const Placement& whole, int64_t dim) {
  if (!whole.is_shard(dim) || whole.shard().outer % 2 != 0) return std::nullopt;
  const Shard& cut = whole.shard();
  return Shard{dim, cut.outer / 2, cut.unit};
}

std::vector<Way> glu_ways(const CallGeometry& call) {
  const int64_t dim = halved_dim(call, 0, 1);
  auto ways = along_ways(call, {.dims = {dim}}, 1);
  if (const auto halves = cut_of_halves(call.arriving[0], dim))
    ways.push_back({{*halves}, {call.arriving[0]}});
  return ways;
}

std::vector<ResultGeometry> glu_results(const CallGeometry& call) {
  auto shape = call.operands[0].shape;
  if (!shape.empty()) shape[static_cast<size_t>(halved_dim(call, 0, 1))] /= 2;
  return {contiguous(std::move(shape))};
}

// glu_backward(grad, self, dim)
std::vector<Way> glu_backward_ways(const CallGeometry& call) {
  const int64_t dim = halved_dim(call, 1, 2);
  auto ways = along_ways(call, {.dims = {dim}}, 1);
  if (const auto halves = cut_of_halves(call.arriving[1], dim))
    ways.push_back({{call.arriving[1]}, {*halves, call.arriving[1]}});
  return ways;
}

std::vector<ResultGeometry> glu_backward_results(const CallGeometry& call) {
  return {contiguous(call.operands[1].shape)};
}

}  // namespace

void add_glu_ways(WaysTable& table) {
  table["glu."] = {.ways = glu_ways, .results = glu_results};
  table["glu_backward."] = {.ways = glu_backward_ways, .results = glu_backward_results};
}

}  // namespace fsdp::internal
