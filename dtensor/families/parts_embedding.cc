// embedding with a table whose rows are cut, as a vocabulary is: each rank looks up the
// rows that it has, zeros for the others, and the results are terms.
#include "dtensor/families/parts.h"
#include "dtensor/internal/cut_indices.h"
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

void add_embedding_parts(PartsTable& table) {
  table["embedding."] = {with_more_ways(ways_table().at("embedding."), cut_rows_ways),
                         look_up_own_rows};
}

}  // namespace fsdp::internal
