// Batch norms: channels are normalised by themselves, so they may be cut; so may the
// batch where no statistics are taken over it, that is in evaluation. In training a cut
// batch is gathered: the statistics are those of the whole batch, as on one device.
//
// Group norms fit where the batch is cut, or channels in whole groups; statistics, a
// number per row and group, are cut with them.
//
// Layer norms fit where a dimension that is not normalised is cut, statistics and all;
// the gradients of weight and bias are then terms of sums over it.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/op_table.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// Of an operand that has a number per channel, or none for the statistics of a kernel
// that keeps none.
Placement cut_channels(const OpSchema& call, size_t i) {
  const bool has_numbers = call.operands[i].is_present() && call.operands[i].size(0) > 0;
  return has_numbers ? Placement(Shard{0}) : Replicate{};
}

// Training writes running statistics, arguments 3 and 4. They must lie as they do once
// channels are cut: of a part that is made for the call the caller would see nothing.
bool writes_no_copies(const OpSchema& call) {
  if (!call.operands[3].is_present() && !call.operands[4].is_present()) return true;
  const Placement cut = Shard{0};
  return call.arriving[3] == cut && call.arriving[4] == cut &&
         std::none_of(call.arriving.begin(), call.arriving.end(),
                      [](const auto& arriving) { return arriving.is_interleaved(); });
}

// native_batch_norm(input, weight, bias, running_mean, running_var, training, ...) ->
// result, mean, rstd. In evaluation kernels give what they normalised with (CUDA), or
// leave these two empty (CPU), which is seen in what a rank gives: so no part of the
// channels may be.
std::vector<PlacementStrategy> batch_norm_strategy(const OpSchema& call) {
  const bool is_training = call.number(5) != 0;
  const Placement row = Shard{0}, channel = Shard{1}, whole = Replicate{};
  std::vector<PlacementStrategy> strategies;
  if (!is_training) strategies.push_back({{row, whole, whole}, {row, whole, whole, whole, whole}});
  if (is_training && !writes_no_copies(call)) return strategies;
  PlacementStrategy cut{
      .results = {channel, row, row}, .operands = {channel}, .takes_empty_parts = false};
  for (size_t i = 1; i < 5; ++i) cut.operands.push_back(cut_channels(call, i));
  strategies.push_back(std::move(cut));
  return strategies;
}

// One like the input, and two of that shape: statistics, or the gradients of weight and
// bias.
std::vector<ResultGeometry> like_input_and_two(const Operand& input,
                                               const std::vector<int64_t>& shape) {
  return {laid_as(input.shape, input.stride), contiguous(shape), contiguous(shape)};
}

std::vector<ResultGeometry> batch_norm_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  return like_input_and_two(input, {input.ndim() >= 2 ? input.size(1) : 0});
}

// native_batch_norm_backward(grad, input, weight, running_mean, running_var, mean, rstd,
// training, ...) -> gradients of input, weight and bias.
std::vector<PlacementStrategy> batch_norm_backward_strategy(const OpSchema& call) {
  const bool is_training = call.number(7) != 0;
  const Placement row = Shard{0}, channel = Shard{1}, whole = Replicate{}, terms = Partial{};
  PlacementStrategy cut{
      .results = {channel, row, row}, .operands = {channel, channel}, .takes_empty_parts = false};
  for (size_t i = 2; i < 7; ++i) cut.operands.push_back(cut_channels(call, i));
  std::vector<PlacementStrategy> strategies{std::move(cut)};
  if (is_training) return strategies;
  strategies.push_back({.results = {row, terms, terms},
                        .operands = {row, row, whole, whole, whole, whole, whole},
                        .takes_empty_parts = false});
  return strategies;
}

std::vector<ResultGeometry> batch_norm_backward_results(const OpSchema& call) {
  return like_input_and_two(call.operands[1], {call.operands[1].size(1)});
}

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
  return like_input_and_two(call.operands[0], {call.number(3), call.number(6)});
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
  return like_input_and_two(call.operands[1], {call.number(6)});
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

// Dimensions of `input` before those that are normalised.
int64_t leading_dims(const OpSchema& call, const Operand& input, size_t normalized_shape) {
  return input.ndim() - static_cast<int64_t>(call.numbers(normalized_shape).size());
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> result, mean, rstd.
std::vector<PlacementStrategy> layer_norm_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < leading_dims(call, call.operands[0], 1); ++d) {
    const Placement cut = Shard{d};
    strategies.push_back({{cut, cut, cut}, {cut, whole, whole}});
  }
  return strategies;
}

std::vector<ResultGeometry> layer_norm_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  auto statistics = input.shape;
  std::fill(statistics.begin() + leading_dims(call, input, 1), statistics.end(), 1);
  return {contiguous(input.shape), contiguous(statistics), contiguous(statistics)};
}

// native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight, bias,
// mask) -> gradients of input, weight and bias.
std::vector<PlacementStrategy> layer_norm_backward_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  std::vector<PlacementStrategy> strategies;
  for (int64_t d = 0; d < leading_dims(call, call.operands[1], 2); ++d) {
    const Placement cut = Shard{d};
    strategies.push_back({{cut, terms, terms}, {cut, cut, cut, cut, whole, whole}});
  }
  return strategies;
}

std::vector<ResultGeometry> layer_norm_backward_results(const OpSchema& call) {
  return {contiguous(call.operands[1].shape), contiguous(call.numbers(2)),
          contiguous(call.numbers(2))};
}

}  // namespace

void add_normalization(OpTable& table) {
  table.add("native_batch_norm.",
            {.strategy = {.strategies = batch_norm_strategy, .results = batch_norm_results}});
  table.add("native_batch_norm_backward.", {.strategy = {.strategies = batch_norm_backward_strategy,
                                                         .results = batch_norm_backward_results}});
  table.add("native_group_norm.", {.strategy = {.strategies = group_norm_strategy,
                                                .results = group_norm_results,
                                                .part_arguments = group_norm_part}});
  table.add("native_group_norm_backward.",
            {.strategy = {.strategies = group_norm_backward_strategy,
                          .results = group_norm_backward_results,
                          .part_arguments = group_norm_backward_part}});
  table.add("native_layer_norm.",
            {.strategy = {.strategies = layer_norm_strategy, .results = layer_norm_results}});
  table.add("native_layer_norm_backward.", {.strategy = {.strategies = layer_norm_backward_strategy,
                                                         .results = layer_norm_backward_results}});
}

}  // namespace fsdp::internal
