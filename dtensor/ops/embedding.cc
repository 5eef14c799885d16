// A table cut along its columns gives results cut along the last dimension; cut indices
// give results cut alike. With a table whose rows are cut, as a vocabulary is, each rank
// looks up the rows that it has, zeros for the others, and the results are terms.
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/ops/op_table.h"

#include <ATen/ops/zeros.h>

#include <utility>

namespace fsdp::internal {
namespace {

// embedding(weight, indices, ...).
std::vector<PlacementStrategy> embedding_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  const int64_t index_ndim = call.operands[1].ndim();
  std::vector<PlacementStrategy> strategies{{{Shard{index_ndim}}, {Shard{1}, whole}}};
  for (int64_t d = 0; d < index_ndim; ++d) strategies.push_back({{Shard{d}}, {whole, Shard{d}}});
  strategies.push_back({{Partial{}}, {Partial{}, whole}});
  strategies.push_back({{Partial{}}, {Shard{0}, whole}});  // of own rows, and zeros
  return strategies;
}

std::vector<ResultGeometry> embedding_results(const OpSchema& call) {
  auto shape = call.operands[1].shape;
  shape.push_back(call.operands[0].size(1));
  return {contiguous(std::move(shape))};
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
// each rank adds up the rows of its indices. How often an index occurs takes all of them.
std::vector<PlacementStrategy> embedding_backward_strategy(const OpSchema& call) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  const int64_t index_ndim = call.operands[1].ndim();
  const bool scales_by_frequency = call.number(4) != 0;
  std::vector<PlacementStrategy> strategies{{{Shard{1}}, {Shard{index_ndim}, whole}},
                                            {{terms}, {terms, whole}}};
  for (int64_t d = 0; d < index_ndim && !scales_by_frequency; ++d) {
    strategies.push_back({{terms}, {Shard{d}, Shard{d}}});
  }
  return strategies;
}

std::vector<ResultGeometry> embedding_backward_results(const OpSchema& call) {
  return {contiguous({call.number(2), call.operands[0].size(-1)})};
}

at::Tensor zero_rows(const at::Tensor& table, const at::Tensor& indices) {
  auto shape = indices.sizes().vec();
  shape.push_back(table.size(1));
  return at::zeros(shape, table.options());
}

// embedding(weight, indices, ...) -> rows.
std::vector<c10::IValue> look_up_own_rows(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec table = placed.operand(0);
  if (!table.is_cut(0)) return call.run();
  const at::Tensor own = call.argument(0).toTensor(), indices = call.argument(1).toTensor();
  check_indices(indices, table.shape()[0], "embedding: index");
  if (own.size(0) == 0) return {zero_rows(own, indices)};
  const auto cut = cut_indices(indices, table, /*dim=*/0);
  call.argument(1) = cut.in_part;
  auto results = call.run();
  return {results[0].toTensor().masked_fill_(cut.is_elsewhere.unsqueeze(-1), 0)};
}

}  // namespace

void add_embedding(OpTable& table) {
  table.add("embedding.",
            {.strategy = {.strategies = embedding_strategy, .results = embedding_results},
             .local_kernel = look_up_own_rows});
  table.add("embedding_dense_backward.", {.strategy = {.strategies = embedding_backward_strategy,
                                                       .results = embedding_backward_results}});
}

}  // namespace fsdp::internal
