// Attention of the heads that a rank has. Where it has queries of a group but not the
// group's keys to itself, keys and values are whole, and the rank takes those of its
// queries' groups: their gradients are terms. A rank may have no head at all, which the
// kernel does not know.
#include "dtensor/families/parts.h"
#include "dtensor/internal/cut_indices.h"
#include "dtensor/ways/broadcast.h"
#include "dtensor/ways/table.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kHeads = 1, kNdim = 4;  // query, key, value: [batch, heads, tokens, width]

// Of operands query, key, value, ... from `query` on, of which the last is the mask.
// Those of queries are cut along the heads, and so are results; `terms` of the results
// are terms.
std::vector<Way> whole_keys_way(const CallGeometry& call, size_t query, size_t results,
                                size_t terms) {
  const Operand& q = call.operands[query];
  if (q.ndim() != kNdim) return {};
  Way way{.results = std::vector<Placement>(results, Shard{kHeads}),
          .operands = std::vector<Placement>(call.operands.size(), Shard{kHeads})};
  way.operands[query + 1] = way.operands[query + 2] = Replicate{};
  way.operands.back() = broadcast_along(call.operands.back(), kNdim, kHeads, q.size(kHeads));
  for (size_t i = results - terms; i < results; ++i) way.results[i] = Partial{};
  return {way};
}

std::vector<Way> whole_keys_ways(const CallGeometry& call) {
  return whole_keys_way(call, /*query=*/0, /*results=*/2, /*terms=*/0);
}
std::vector<Way> whole_keys_backward_ways(const CallGeometry& call) {
  return whole_keys_way(call, /*query=*/1, /*results=*/3, /*terms=*/2);
}

// Which head of the keys each of this rank's queries attends to.
at::Tensor groups_of_part(const DTensorSpec& query, const DTensorSpec& key) {
  const int64_t heads = query.shape()[kHeads], groups = key.shape()[kHeads];
  return elements_of_part(query, kHeads).floor_divide(heads / groups);
}

bool has_whole_keys(const DTensorSpec& query, const DTensorSpec& key) {
  return query.is_cut(kHeads) && !key.is_cut(kHeads);
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
  const at::Tensor query = call.argument(0).toTensor();
  if (query.numel() == 0) return attention_of_nothing(query, call.argument(2).toTensor());
  const DTensorSpec q = placed.operand(0), k = placed.operand(1);
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
  const at::Tensor query = call.argument(1).toTensor(), key = call.argument(2).toTensor(),
                   value = call.argument(3).toTensor();
  if (query.numel() == 0)
    return {at::zeros_like(query), at::zeros_like(key), at::zeros_like(value)};
  const DTensorSpec q = placed.operand(1), k = placed.operand(2);
  if (!has_whole_keys(q, k)) return call.run();
  const at::Tensor groups = groups_of_part(q, k);
  take_groups(call, 2, groups);
  auto gradients = call.run();
  return {gradients[0], put_back(gradients[1].toTensor(), key, groups),
          put_back(gradients[2].toTensor(), value, groups)};
}

}  // namespace

void add_attention_parts(PartsTable& table) {
  const std::string flash = "_scaled_dot_product_flash_attention_for_cpu";
  table[flash + "."] = {with_more_ways(ways_table().at(flash + "."), whole_keys_ways),
                        attention_of_part};
  table[flash + "_backward."] = {
      with_more_ways(ways_table().at(flash + "_backward."), whole_keys_backward_ways),
      attention_backward_of_part};
}

}  // namespace fsdp::internal
