// What works along some dimensions fits where another one is cut.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/whole_dim_strategy.h"

namespace fsdp::internal {
namespace {

// tril, triu: both dimensions of the matrices.
Along matrices(const OpSchema& call) {
  const int64_t ndim = call.operands[0].ndim();
  return {.dims = {ndim - 2, ndim - 1}};
}

}  // namespace

void add_whole_dim(OpTable& table) {
  for (const char* name : {"cumsum.", "cumprod."})
    table.add_with_in_place(name, {.strategy = along(kept<1>)});
  for (const char* name : {"logcumsumexp.", "flip."}) table.add(name, {.strategy = along(kept<1>)});
  for (const char* name : {"cummax.", "cummin.", "sort."})
    table.add(name, {.strategy = along(kept<1>, 2)});
  table.add("sort.stable", {.strategy = along(kept<2>, 2)});
  table.add("roll.", {.strategy = along(kept<2>)});
  for (const char* name : {"tril.", "triu."})
    table.add_with_in_place(name, {.strategy = along(matrices)});
  for (const char* name : {"median.dim", "nanmedian.dim", "mode."})
    table.add(name, {.strategy = along(reduced<1>, 2)});
  table.add("kthvalue.", {.strategy = along(reduced<2>, 2)});
  table.add("logsumexp.", {.strategy = along(reduced<1>)});
  for (const char* name : {"median.", "nanmedian."})
    table.add(name, {.strategy = along(all_reduced)});
}

}  // namespace fsdp::internal
