// Matrices that are cut along rows or columns fit; cut along the inner dimension each
// rank has a term of the sum. A product is linear in each factor, so terms of one factor
// give terms of the result where the other is whole.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/pointwise_strategy.h"

namespace fsdp::internal {
namespace {

std::vector<PlacementStrategy> mm_strategy(const OpSchema&) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  return {{{Shard{0}}, {Shard{0}, whole}},
          {{Shard{1}}, {whole, Shard{1}}},
          {{terms}, {Shard{1}, Shard{0}}},
          {{terms}, {terms, whole}},
          {{terms}, {whole, terms}}};
}

std::vector<PlacementStrategy> bmm_strategy(const OpSchema&) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  return {{{Shard{0}}, {Shard{0}, Shard{0}}}, {{Shard{1}}, {Shard{1}, whole}},
          {{Shard{2}}, {whole, Shard{2}}},    {{terms}, {Shard{2}, Shard{1}}},
          {{terms}, {terms, whole}},          {{terms}, {whole, terms}}};
}

// A matrix times a vector.
std::vector<PlacementStrategy> mv_strategy(const OpSchema&) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  return {{{Shard{0}}, {Shard{0}, whole}},
          {{terms}, {Shard{1}, Shard{0}}},
          {{terms}, {terms, whole}},
          {{terms}, {whole, terms}}};
}

// Of two vectors.
std::vector<PlacementStrategy> dot_strategy(const OpSchema&) {
  const Placement whole = Replicate{};
  const Placement terms = Partial{};
  return {{{terms}, {Shard{0}, Shard{0}}}, {{terms}, {terms, whole}}, {{terms}, {whole, terms}}};
}

std::vector<ResultGeometry> dot_results(const OpSchema&) { return {contiguous({})}; }

// The sizes of the product that is added to operand 0.
struct Added {
  const Operand& operand;
  std::vector<int64_t> shape;

  // Cut as the result is; one term where the result is terms.
  Placement beside(const Placement& result) const {
    if (!result.is_shard()) return result;
    const int64_t dim = result.shard_dim();
    return broadcast_along(operand, static_cast<int64_t>(shape.size()), dim,
                           shape[static_cast<size_t>(dim)]);
  }
};

std::vector<PlacementStrategy> with_added(std::vector<PlacementStrategy> product,
                                          const Added& added) {
  for (PlacementStrategy& strategy : product) {
    strategy.operands.insert(strategy.operands.begin(), added.beside(strategy.results[0]));
  }
  return product;
}

// addmm(self, a, b): self + a b.
std::vector<PlacementStrategy> addmm_strategy(const OpSchema& call) {
  const Operand& a = call.operands[1];
  const Operand& b = call.operands[2];
  return with_added(mm_strategy(call), {call.operands[0], {a.size(0), b.size(1)}});
}

std::vector<PlacementStrategy> baddbmm_strategy(const OpSchema& call) {
  const Operand& a = call.operands[1];
  const Operand& b = call.operands[2];
  return with_added(bmm_strategy(call), {call.operands[0], {a.size(0), a.size(1), b.size(2)}});
}

}  // namespace

void add_matmul(OpTable& table) {
  table.add("mm.", {.strategy = {.strategies = mm_strategy}});
  table.add("bmm.", {.strategy = {.strategies = bmm_strategy}});
  table.add("mv.", {.strategy = {.strategies = mv_strategy}});
  for (const char* name : {"dot.", "vdot."})
    table.add(name, {.strategy = {.strategies = dot_strategy, .results = dot_results}});
  table.add("addmm.", {.strategy = {.strategies = addmm_strategy}});
  table.add("baddbmm.", {.strategy = {.strategies = baddbmm_strategy}});
}

}  // namespace fsdp::internal
