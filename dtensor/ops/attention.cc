// Attention fits where the batch or the heads are cut. Grouped heads fit where every
// rank's queries find their keys, which divisible numbers of heads make sure of. Where a
// rank has queries of a group but not the group's keys to itself, keys and values are
// whole, and the rank takes those of its queries' groups: their gradients are terms. A
// rank may have no head at all, which the kernel does not know. Which kernel attention
// takes must not depend on the rank. Where the sequence is cut, ranks compute their rows
// of the queries (attention_over_sequence.h).
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/ops/attention_over_sequence.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/pointwise_strategy.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kBatch = 0, kHeads = kAttentionHeads, kSequence = kAttentionSequence;
constexpr int64_t kNdim = kAttentionNdim;

bool heads_may_be_cut(const Operand& query, const Operand& key, int64_t parts) {
  const int64_t heads = query.size(kHeads);
  const int64_t groups = key.size(kHeads);
  return heads == groups || (heads % parts == 0 && groups % parts == 0);
}

std::vector<int64_t> dims_that_may_be_cut(const Operand& query, const Operand& key, int64_t parts) {
  std::vector<int64_t> dims{kBatch};
  if (heads_may_be_cut(query, key, parts)) dims.push_back(kHeads);
  return dims;
}

// All operands and results cut alike along `dim`, but for the mask, which is the last
// operand. Operands `query` and after it are the query, the key and the value.
PlacementStrategy cut_along_strategy(const OpSchema& call, size_t query, size_t results,
                                     int64_t dim) {
  PlacementStrategy strategy{.results = std::vector<Placement>(results, Shard{dim}),
                             .operands = std::vector<Placement>(call.operands.size(), Shard{dim})};
  strategy.operands.back() =
      broadcast_along(call.operands.back(), kNdim, dim, call.operands[query].size(dim));
  return strategy;
}

// The heads cut but for those of keys and values; the last `terms` of the results, their
// gradients, are terms.
PlacementStrategy whole_keys_strategy(const OpSchema& call, size_t query, size_t results,
                                      size_t terms) {
  PlacementStrategy strategy = cut_along_strategy(call, query, results, kHeads);
  strategy.operands[query + 1] = strategy.operands[query + 2] = Replicate{};
  for (size_t i = results - terms; i < results; ++i) strategy.results[i] = Partial{};
  return strategy;
}

// Some rows of the queries; keys and values whole, and their gradients terms, or cut too.
// Only where queries come so: what the second one sends in the operator is not counted.
std::vector<PlacementStrategy> sequence_strategies(const OpSchema& call, size_t query,
                                                   size_t results, size_t terms) {
  if (!call.arriving.empty() && !call.arriving[query].is_shard(kSequence)) return {};
  PlacementStrategy all = cut_along_strategy(call, query, results, kSequence), rows = all;
  all.asks_other_ranks = true;
  rows.operands[query + 1] = rows.operands[query + 2] = Replicate{};
  for (size_t i = results - terms; i < results; ++i) rows.results[i] = Partial{};
  return {rows, all};
}

std::vector<PlacementStrategy> attention_strategy(const OpSchema& call, size_t query,
                                                  size_t results, size_t terms) {
  const Operand& q = call.operands[query];
  if (q.ndim() != kNdim) return {};
  std::vector<PlacementStrategy> strategies;
  for (const int64_t dim : dims_that_may_be_cut(q, call.operands[query + 1], call.parts))
    strategies.push_back(cut_along_strategy(call, query, results, dim));
  strategies.push_back(whole_keys_strategy(call, query, results, terms));
  for (auto& strategy : sequence_strategies(call, query, results, terms))
    strategies.push_back(std::move(strategy));
  return strategies;
}

// (query, key, value, dropout_p, is_causal, mask, scale) -> result, logsumexp.
std::vector<PlacementStrategy> flash_strategy(const OpSchema& call) {
  return attention_strategy(call, /*query=*/0, /*results=*/2, /*terms=*/0);
}

std::vector<ResultGeometry> flash_results(const OpSchema& call) {
  const Operand& query = call.operands[0];
  auto shape = query.shape;
  shape.back() = call.operands[2].size(-1);
  auto rows = shape;
  rows.pop_back();
  return {laid_as(std::move(shape), query.stride), transposed(std::move(rows), 1, 2)};
}

// (grad, query, key, value, result, logsumexp, dropout_p, is_causal, mask, scale) ->
// gradients of query, key and value.
std::vector<PlacementStrategy> flash_backward_strategy(const OpSchema& call) {
  return attention_strategy(call, /*query=*/1, /*results=*/3, /*terms=*/2);
}

std::vector<ResultGeometry> flash_backward_results(const OpSchema& call) {
  std::vector<ResultGeometry> results;
  for (const size_t i : {1, 2, 3}) results.push_back(transposed(call.operands[i].shape, 1, 2));
  return results;
}

// Which head of the keys each of this rank's queries attends to.
at::Tensor groups_of_part(const DTensorSpec& query, const DTensorSpec& key) {
  const int64_t heads = query.shape()[kHeads], groups = key.shape()[kHeads];
  return elements_of_part(query, kHeads).floor_divide(heads / groups);
}

bool has_whole_keys(const DTensorSpec& query, const DTensorSpec& key) {
  return query.is_cut(kHeads) && !key.is_cut(kHeads);
}

bool is_over_sequence(const DTensorSpec& query, const DTensorSpec& key) {
  return query.is_cut(kSequence) || key.is_cut(kSequence);
}

SequenceCall over_sequence(OperatorCall& call, const PlacedOnMesh& placed, size_t query) {
  const DTensorSpec q = placed.operand(query), k = placed.operand(query + 1);
  return {.call = call,
          .query = q,
          .key = k,
          .value = placed.operand(query + 2),
          .groups = has_whole_keys(q, k) ? groups_of_part(q, k) : at::Tensor()};
}

// Arguments `at` and after it, the keys and the values, become those of the groups.
void take_groups(OperatorCall& call, size_t at, const at::Tensor& groups) {
  for (const size_t i : {at, at + 1})
    call.argument(i) = call.argument(i).toTensor().index_select(kHeads, groups);
}

// The kernel's results for no query.
std::vector<c10::IValue> attention_of_nothing(const at::Tensor& query, const at::Tensor& value) {
  auto shape = query.sizes().vec();
  shape.back() = value.size(-1);
  const auto sums = query.options().dtype(at::toOpMathType(query.scalar_type()));
  return {at::zeros(shape, query.options()),
          at::zeros({query.size(0), query.size(1), query.size(2)}, sums)};
}

// (query, key, value, ...) -> result, logsumexp
std::vector<c10::IValue> attention_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec q = placed.operand(0), k = placed.operand(1);
  if (is_over_sequence(q, k)) return attention_over_sequence(over_sequence(call, placed, 0));
  const at::Tensor query = call.argument(0).toTensor();
  if (query.numel() == 0) return attention_of_nothing(query, call.argument(2).toTensor());
  if (has_whole_keys(q, k)) take_groups(call, 1, groups_of_part(q, k));
  return call.run();
}

// What a gradient of the groups that were taken is to the keys, or values, `whole`.
at::Tensor put_back(const at::Tensor& gradient, const at::Tensor& whole, const at::Tensor& groups) {
  return at::zeros(whole.sizes(), gradient.options()).index_add_(kHeads, groups, gradient);
}

// (grad, query, key, value, ...) -> gradients of query, key and value
std::vector<c10::IValue> attention_backward_of_part(OperatorCall& call,
                                                    const PlacedOnMesh& placed) {
  const DTensorSpec q = placed.operand(1), k = placed.operand(2);
  if (is_over_sequence(q, k))
    return attention_over_sequence_backward(over_sequence(call, placed, 1));
  const at::Tensor query = call.argument(1).toTensor(), key = call.argument(2).toTensor(),
                   value = call.argument(3).toTensor();
  if (query.numel() == 0)
    return {at::zeros_like(query), at::zeros_like(key), at::zeros_like(value)};
  if (!has_whole_keys(q, k)) return call.run();
  const at::Tensor groups = groups_of_part(q, k);
  take_groups(call, 2, groups);
  auto gradients = call.run();
  return {gradients[0], put_back(gradients[1].toTensor(), key, groups),
          put_back(gradients[2].toTensor(), value, groups)};
}

// _fused_sdp_choice: looks at shapes, so at tensors of the global shape. Local.
void choose_for_whole(OperatorCall& call, const StrategyKernel* /*by_strategy*/) {
  const ArgumentKinds kinds(call.handle().schema());
  auto operands = kinds.operands_of(call);
  for (at::Tensor& operand : operands) {
    if (!operand.defined()) continue;
    const bool requires_grad = operand.requires_grad();
    operand = at::empty_strided(operand.sizes(), operand.strides(),
                                at::device(operand.device()).dtype(operand.dtype()));
    operand.set_requires_grad(requires_grad);
  }
  kinds.replace_operands(call, operands);
  call.finish(call.run());
}

}  // namespace

void add_attention(OpTable& table) {
  const std::string flash = "_scaled_dot_product_flash_attention_for_cpu";
  table.add(flash + ".", {.strategy = {.strategies = flash_strategy, .results = flash_results},
                          .local_kernel = attention_of_part});
  table.add(flash + "_backward.",
            {.strategy = {.strategies = flash_backward_strategy, .results = flash_backward_results},
             .local_kernel = attention_backward_of_part});
  table.add("_fused_sdp_choice.", {.handler = choose_for_whole});
}

}  // namespace fsdp::internal
