// Scaled dot product attention, fused, on CPUs: fits where the batch or the heads are
// cut. Grouped heads fit where every rank's queries find their keys, which divisible
// numbers of heads make sure of; elsewhere keys and values are whole
// (families/parts_attention.cc).
#include "dtensor/ways/broadcast.h"
#include "dtensor/ways/table.h"

#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kBatch = 0, kHeads = 1, kNdim = 4;  // query, key, value: [B, H, S, D]

bool heads_may_be_cut(const Operand& query, const Operand& key, int64_t parts) {
  const int64_t heads = query.size(kHeads);
  const int64_t groups = key.size(kHeads);
  return heads == groups || (heads % parts == 0 && groups % parts == 0);
}

std::vector<int64_t> dims_that_may_be_cut(const Operand& query, const Operand& key, int64_t parts) {
  std::vector<int64_t> dims;
  if (query.ndim() != kNdim) return dims;
  dims.push_back(kBatch);
  if (heads_may_be_cut(query, key, parts)) dims.push_back(kHeads);
  return dims;
}

// The first of `call`'s operands are cut alike, the last is the mask.
std::vector<Way> attention_ways(const CallGeometry& call, size_t query, size_t results) {
  const Operand& q = call.operands[query];
  const Operand& mask = call.operands.back();
  std::vector<Way> ways;
  for (int64_t dim : dims_that_may_be_cut(q, call.operands[query + 1], call.parts)) {
    Way way{.results = std::vector<Placement>(results, Shard{dim}),
            .operands = std::vector<Placement>(call.operands.size(), Shard{dim})};
    way.operands.back() = broadcast_along(mask, kNdim, dim, q.size(dim));
    ways.push_back(std::move(way));
  }
  return ways;
}

// (query, key, value, dropout_p, is_causal, mask, scale) -> result, logsumexp.
std::vector<Way> flash_ways(const CallGeometry& call) { return attention_ways(call, 0, 2); }

std::vector<ResultGeometry> flash_results(const CallGeometry& call) {
  const Operand& query = call.operands[0];
  auto shape = query.shape;
  shape.back() = call.operands[2].size(-1);
  auto rows = shape;
  rows.pop_back();
  return {laid_as(std::move(shape), query.stride), transposed(std::move(rows), 1, 2)};
}

// (grad, query, key, value, result, logsumexp, dropout_p, is_causal, mask, scale) ->
// gradients of query, key and value.
std::vector<Way> flash_backward_ways(const CallGeometry& call) {
  return attention_ways(call, 1, 3);
}

std::vector<ResultGeometry> flash_backward_results(const CallGeometry& call) {
  std::vector<ResultGeometry> results;
  for (size_t i : {1, 2, 3}) results.push_back(transposed(call.operands[i].shape, 1, 2));
  return results;
}

}  // namespace

void add_attention_ways(WaysTable& table) {
  const std::string flash = "_scaled_dot_product_flash_attention_for_cpu";
  table[flash + "."] = {.ways = flash_ways, .results = flash_results};
  table[flash + "_backward."] = {.ways = flash_backward_ways, .results = flash_backward_results};
}

}  // namespace fsdp::internal
