// Group norms fit where the batch is cut, or channels in whole groups; statistics, a
// number per row and group, are cut with them.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"

#include <algorithm>
#include <optional>

namespace fsdp::internal {
namespace {

// The numbers of a call: N, C, HxW and groups from argument `first` on, of operand
// `input`.
struct Groups {
  const OpSchema& call;
  size_t input, first;

  int64_t channels() const { return call.number(first + 1); }
  int64_t count() const { return call.number(first + 3); }

  // Whether N and C are those of the input.
  bool are_of_input() const {
    const Operand& operand = call.operands[input];
    return operand.ndim() >= 2 && operand.size(0) == call.number(first) &&
           operand.size(1) == channels() && count() > 0 && channels() % count() == 0;
  }

  // How channels arrive if every rank has whole groups of them.
  std::optional<Shard> whole_on_ranks() const {
    const Placement& arriving = call.arriving[input];
    if (!arriving.is_shard(1) || arriving.shard().outer > 1 || arriving.is_ragged())
      return std::nullopt;
    const bool others_are_interleaved =
        std::any_of(call.arriving.begin(), call.arriving.end(),
                    [](const auto& other) { return other.is_interleaved(); });
    if (!arriving.is_interleaved() && others_are_interleaved) return std::nullopt;
    if (!are_cut_as(arriving.shard())) return std::nullopt;
    return arriving.shard();
  }

 private:
  // Whether chunks of channels have the channels of chunks of groups; of ranks that other
  // mesh dimensions cut further, where all have as many.
  bool are_cut_as(const Shard& cut) const {
    const int64_t atoms = atoms_of(cut, channels());
    if (call.parts > call.ranks) return count() % call.parts == 0 && atoms % call.parts == 0;
    return chunk_capacity(atoms, call.ranks) * cut.unit ==
           chunk_capacity(count(), call.ranks) * (channels() / count());
  }
};

Placement cut_weight(const OpSchema& call, size_t i, const Shard& cut) {
  return call.operands[i].is_present() ? Placement(cut).along(0) : Replicate{};
}

// native_group_norm(input, weight, bias, N, C, HxW, groups, eps) -> result, mean, rstd
std::vector<PlacementStrategy> group_norm_strategy(const OpSchema& call) {
  const Groups groups{.call = call, .input = 0, .first = 3};
  if (!groups.are_of_input()) return {};
  const Placement row = Shard{0}, whole = Replicate{}, statistics = Shard{1};
  std::vector<PlacementStrategy> strategies{{{row, row, row}, {row, whole, whole}}};
  if (const auto cut = groups.whole_on_ranks()) {
    strategies.push_back({.results = {*cut, statistics, statistics},
                          .operands = {*cut, cut_weight(call, 1, *cut), cut_weight(call, 2, *cut)},
                          .takes_empty_parts = false});
  }
  return strategies;
}

std::vector<ResultGeometry> group_norm_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  const std::vector<int64_t> statistics{call.number(3), call.number(6)};
  return {laid_as(input.shape, input.stride), contiguous(statistics), contiguous(statistics)};
}

// native_group_norm_backward(grad, input, mean, rstd, weight, N, C, HxW, groups, mask) ->
// gradients of input, weight and bias.
std::vector<PlacementStrategy> group_norm_backward_strategy(const OpSchema& call) {
  const Groups groups{.call = call, .input = 1, .first = 5};
  if (!groups.are_of_input()) return {};
  const Placement row = Shard{0}, whole = Replicate{}, terms = Partial{}, statistics = Shard{1};
  std::vector<PlacementStrategy> strategies{{{row, terms, terms}, {row, row, row, row, whole}}};
  if (const auto cut = groups.whole_on_ranks()) {
    const Placement weight = Placement(*cut).along(0);
    strategies.push_back(
        {.results = {*cut, weight, weight},
         .operands = {*cut, *cut, statistics, statistics, cut_weight(call, 4, *cut)},
         .takes_empty_parts = false});
  }
  return strategies;
}

std::vector<ResultGeometry> group_norm_backward_results(const OpSchema& call) {
  const Operand& input = call.operands[1];
  const std::vector<int64_t> channels{call.number(6)};
  return {laid_as(input.shape, input.stride), contiguous(channels), contiguous(channels)};
}

// N, C and the number of groups of a part.
std::vector<PartArgument> part_of_groups(const Groups& groups, const TensorLayout& input,
                                         const TensorLayout& mean, const PlacedCall& placed) {
  if (!groups.are_of_input()) return {};
  const auto shape = input.local_shape(placed.coordinate);
  const auto statistics = mean.local_shape(placed.coordinate);
  return {
      {groups.first, shape[0]}, {groups.first + 1, shape[1]}, {groups.first + 3, statistics[1]}};
}

std::vector<PartArgument> group_norm_part(const OpSchema& call, const PlacedCall& placed) {
  return part_of_groups({call, 0, 3}, placed.results[0], placed.results[1], placed);
}
std::vector<PartArgument> group_norm_backward_part(const OpSchema& call, const PlacedCall& placed) {
  return part_of_groups({call, 1, 5}, placed.operands[1], placed.operands[2], placed);
}

}  // namespace

void add_group_norm(OpTable& table) {
  table.add("native_group_norm.", {.strategy = {.strategies = group_norm_strategy,
                                                .results = group_norm_results,
                                                .part_arguments = group_norm_part}});
  table.add("native_group_norm_backward.",
            {.strategy = {.strategies = group_norm_backward_strategy,
                          .results = group_norm_backward_results,
                          .part_arguments = group_norm_backward_part}});
}

}  // namespace fsdp::internal
