// Channels are normalised by themselves, so they may be cut; so may the batch where no
// statistics are taken over it, that is in evaluation. In training a cut batch is
// gathered: the statistics are those of the whole batch, as on one device.
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_present(const OpSchema& call, size_t i) { return call.operands[i].is_present(); }

// Of an operand that has a number per channel, or none for the statistics of a kernel
// that keeps none.
Placement cut_channels(const OpSchema& call, size_t i) {
  const bool has_numbers = is_present(call, i) && call.operands[i].size(0) > 0;
  return has_numbers ? Placement(Shard{0}) : Replicate{};
}

// Training writes running statistics, arguments 3 and 4. They must lie as they do once
// channels are cut: of a part that is made for the call the caller would see nothing.
bool writes_no_copies(const OpSchema& call) {
  if (!is_present(call, 3) && !is_present(call, 4)) return true;
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

std::vector<ResultGeometry> batch_norm_results(const OpSchema& call) {
  const Operand& input = call.operands[0];
  const std::vector<int64_t> statistics{input.ndim() >= 2 ? input.size(1) : 0};
  return {laid_as(input.shape, input.stride), contiguous(statistics), contiguous(statistics)};
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
  const Operand& input = call.operands[1];
  const std::vector<int64_t> channels{input.size(1)};
  return {laid_as(input.shape, input.stride), contiguous(channels), contiguous(channels)};
}

}  // namespace

void add_batch_norm(OpTable& table) {
  table.add("native_batch_norm.",
            {.strategy = {.strategies = batch_norm_strategy, .results = batch_norm_results}});
  table.add("native_batch_norm_backward.", {.strategy = {.strategies = batch_norm_backward_strategy,
                                                         .results = batch_norm_backward_results}});
}

}  // namespace fsdp::internal
