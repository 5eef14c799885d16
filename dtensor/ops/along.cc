// What works along some dimensions fits where another one is cut.
#include "dtensor/ops/along.h"

#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/along_ways.h"

namespace fsdp::internal {
namespace {

// tril, triu: both dimensions of the matrices.
Along matrices(const CallGeometry& call) {
  const int64_t ndim = call.operands[0].ndim();
  return {.dims = {ndim - 2, ndim - 1}};
}

}  // namespace

void add_along(OpTable& table) {
  for (const char* name : {"cumsum.", "cumprod."})
    table.add_with_in_place(name, {.ways = along(kept<1>)});
  for (const char* name : {"logcumsumexp.", "flip."}) table.add(name, {.ways = along(kept<1>)});
  for (const char* name : {"cummax.", "cummin.", "sort."})
    table.add(name, {.ways = along(kept<1>, 2)});
  table.add("sort.stable", {.ways = along(kept<2>, 2)});
  table.add("roll.", {.ways = along(kept<2>)});
  for (const char* name : {"tril.", "triu."})
    table.add_with_in_place(name, {.ways = along(matrices)});
  for (const char* name : {"median.dim", "nanmedian.dim", "mode."})
    table.add(name, {.ways = along(reduced<1>, 2)});
  table.add("kthvalue.", {.ways = along(reduced<2>, 2)});
  table.add("logsumexp.", {.ways = along(reduced<1>)});
  for (const char* name : {"median.", "nanmedian."}) table.add(name, {.ways = along(all_reduced)});
}

}  // namespace fsdp::internal
