// Copies, and new tensors made from one: they lie as it does. No torch here.
#include "dtensor/ways/copy_ways.h"

#include "dtensor/internal/shard_layout.h"
#include "dtensor/ways/pointwise_ways.h"
#include "dtensor/ways/table.h"

#include <utility>

namespace fsdp::internal {
namespace {

using Op = Partial::Op;

enum MemoryFormat : int64_t { kContiguous, kPreserve, kChannelsLast };  // as at::MemoryFormat

// With the second dimension last in memory.
ResultGeometry channels_last(const std::vector<int64_t>& shape) {
  std::vector<int64_t> stride = contiguous_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d) stride[d] *= d == 1 ? 1 : 2;
  stride[1] = 1;
  return laid_as(shape, stride);
}

// None means as operand 0 lies, without gaps.
ResultGeometry copied(const CallGeometry& call, size_t memory_format) {
  const Operand& self = call.operands[0];
  const auto* const given = std::get_if<int64_t>(&call.plain[memory_format]);
  if (given == nullptr || *given == kPreserve) return laid_as(self.shape, self.stride);
  return *given == kContiguous ? contiguous(self.shape) : channels_last(self.shape);
}

// Terms need not be added up to make something new.
std::vector<Way> ways_from_terms() {
  std::vector<Way> ways;
  for (const Op op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct})
    ways.push_back({.results = {Replicate{}}, .operands = {Partial{op}}});
  return ways;
}

// zeros_like and its like.
std::vector<Way> like_ways(const CallGeometry& call) {
  auto ways = ways_from_terms();
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d)
    ways.push_back({.results = {Shard{d}}, .operands = {Shard{d}}});
  return ways;
}

// new_zeros(self, size, ...): as self where that is cut along dimensions that both have,
// else whole.
std::vector<Way> new_ways(const CallGeometry& call) {
  const Operand& self = call.operands[0];
  const auto& size = call.numbers(1);
  auto ways = ways_from_terms();
  for (int64_t d = 0; d < self.ndim(); ++d) {
    const bool have_both =
        size.size() == self.shape.size() && size[static_cast<size_t>(d)] == self.size(d);
    ways.push_back(
        {.results = {have_both ? Placement(Shard{d}) : Replicate{}}, .operands = {Shard{d}}});
  }
  return ways;
}

std::vector<ResultGeometry> new_results(const CallGeometry& call) {
  return {contiguous(call.numbers(1))};
}
std::vector<PartArgument> new_part(const CallGeometry&, const PlacedCall& placed) {
  return {{1, placed.results[0].local_shape(placed.coordinate)}};
}

// new_empty_strided(self, size, stride, ...)
std::vector<ResultGeometry> new_strided_results(const CallGeometry& call) {
  return {{.shape = call.numbers(1), .stride = call.numbers(2)}};
}
std::vector<PartArgument> new_strided_part(const CallGeometry&, const PlacedCall& placed) {
  const TensorLayout& whole = placed.results[0];
  auto shape = whole.local_shape(placed.coordinate);
  auto stride = shape == whole.shape() ? whole.stride() : dense_strides(shape, whole.stride());
  return {{1, std::move(shape)}, {2, std::move(stride)}};
}

}  // namespace

OperatorWays copying(bool rounds, size_t memory_format) {
  const auto linearity = rounds ? Linearity::kNone : Linearity::kAny;
  return {.ways = [=](const CallGeometry& call) { return pointwise_ways(call, linearity); },
          .results =
              [=](const CallGeometry& call) {
                return std::vector<ResultGeometry>{copied(call, memory_format)};
              }};
}

void add_copy_ways(WaysTable& table) {
  table["clone."] = copying(/*rounds=*/false, /*memory_format=*/1);
  for (const char* name : {"empty_like.", "zeros_like.", "ones_like.", "full_like."})
    table[name] = {.ways = like_ways};
  for (const char* name : {"new_empty.", "new_zeros.", "new_ones.", "new_full."})
    table[name] = {.ways = new_ways, .results = new_results, .part_arguments = new_part};
  table["new_empty_strided."] = {
      .ways = new_ways, .results = new_strided_results, .part_arguments = new_strided_part};
}

}  // namespace fsdp::internal
