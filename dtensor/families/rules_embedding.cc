// embedding with a table whose rows are cut, as a vocabulary is: each rank looks up the
// rows that it has, zeros for the others, and the results are terms.
#include "dtensor/families/rules.h"
#include "dtensor/internal/cut_indices.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/table.h"

#include <ATen/ops/zeros.h>

namespace fsdp::internal {
namespace {

std::vector<Way> cut_rows_ways(const CallGeometry& /*call*/) {
  return {{.results = {Partial{}}, .operands = {Shard{0}, Replicate{}}}};
}

at::Tensor zero_rows(const at::Tensor& table, const at::Tensor& indices) {
  auto shape = indices.sizes().vec();
  shape.push_back(table.size(1));
  return at::zeros(shape, table.options());
}

// embedding(weight, indices, ...) -> rows.
std::vector<c10::IValue> look_up_own_rows(OperatorCall& call,
                                          const std::vector<DTensorSpec>& placed) {
  const DTensorSpec& table = placed[0];
  if (!table.is_cut(0)) return call.run();
  const at::Tensor own = call.argument(0).toTensor(), indices = call.argument(1).toTensor();
  check_indices(indices, table.shape()[0], "embedding: index");
  if (own.size(0) == 0) return {zero_rows(own, indices)};
  const auto cut = cut_indices(indices, table, /*dim=*/0);
  call.argument(1) = cut.in_part;
  auto results = call.run();
  return {results[0].toTensor().masked_fill_(cut.is_elsewhere.unsqueeze(-1), 0)};
}

void embedding_rule(OperatorCall& call) {
  static const WaysKernel by_ways(with_more_ways(ways_table().at("embedding."), cut_rows_ways),
                                  call.handle(), look_up_own_rows);
  by_ways.run(call);
}

}  // namespace

void add_embedding_rules(RuleTable& table) { table["embedding."] = embedding_rule; }

}  // namespace fsdp::internal
