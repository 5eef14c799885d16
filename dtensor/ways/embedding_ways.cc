// Looking up rows of a table. A table cut along its columns gives results cut along the
// last dimension; cut indices give results cut alike.
#include "dtensor/ways/table.h"

#include <utility>

namespace fsdp::internal {
namespace {

// embedding(weight, indices, ...).
std::vector<Way> embedding_ways(const CallGeometry& call) {
  const Placement whole = Replicate{};
  const int64_t index_ndim = call.operands[1].ndim();
  std::vector<Way> ways{{{Shard{index_ndim}}, {Shard{1}, whole}}};
  for (int64_t d = 0; d < index_ndim; ++d) ways.push_back({{Shard{d}}, {whole, Shard{d}}});
  ways.push_back({{Partial{}}, {Partial{}, whole}});
  return ways;
}

std::vector<ResultGeometry> embedding_results(const CallGeometry& call) {
  auto shape = call.operands[1].shape;
  shape.push_back(call.operands[0].size(1));
  return {contiguous(std::move(shape))};
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
// each rank adds up the rows of its indices. How often an index occurs takes all of them.
std::vector<Way> embedding_backward_ways(const CallGeometry& call) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  const int64_t index_ndim = call.operands[1].ndim();
  const bool scales_by_frequency = call.number(4) != 0;
  std::vector<Way> ways{{{Shard{1}}, {Shard{index_ndim}, whole}}, {{terms}, {terms, whole}}};
  for (int64_t d = 0; d < index_ndim && !scales_by_frequency; ++d) {
    ways.push_back({{terms}, {Shard{d}, Shard{d}}});
  }
  return ways;
}

std::vector<ResultGeometry> embedding_backward_results(const CallGeometry& call) {
  return {contiguous({call.number(2), call.operands[0].size(-1)})};
}

}  // namespace

void add_embedding_ways(WaysTable& table) {
  table["embedding."] = {.ways = embedding_ways, .results = embedding_results};
  table["embedding_dense_backward."] = {.ways = embedding_backward_ways,
                                        .results = embedding_backward_results};
}

}  // namespace fsdp::internal
