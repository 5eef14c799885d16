// Reductions. Along a cut dimension each rank reduces its part and the results are terms:
// nothing is sent until somebody needs the value. No torch here.
#include "dtensor/ways/along_ways.h"
#include "dtensor/ways/table.h"

#include <utility>

namespace fsdp::internal {
namespace {

using Op = Partial::Op;

// A result that is terms of `across` where a reduced dimension is cut, and of those that
// the reduction goes through term by term.
struct ReducedTerms {
  Op across;
  std::vector<Op> keeps;
};

std::vector<Way> reduction_ways(const CallGeometry& call, const Along& along,
                                const std::vector<ReducedTerms>& results) {
  auto ways = along_ways(call, along, results.size());
  for (int64_t dim : along.dims) {
    Way way{.results = {}, .operands = {Shard{dim}}};
    for (const ReducedTerms& result : results) way.results.push_back(Partial{result.across});
    ways.push_back(std::move(way));
  }
  for (const Op op : results[0].keeps) ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

OperatorWays reduction(AlongOf along_of, std::vector<ReducedTerms> results) {
  return {
      .ways =
          [=](const CallGeometry& call) { return reduction_ways(call, along_of(call), results); },
      .results =
          [along_of, count = results.size()](const CallGeometry& call) {
            return std::vector<ResultGeometry>(count, along_result(call, along_of(call)));
          }};
}

// The dimension or dimensions of argument `place`, all where there are none, go away.
template <size_t place>
Along gone(const CallGeometry& call) {
  return {.dims = given_dims(call, place), .then = Along::Then::kGo};
}

// any and all take an empty list at its word.
Along reduced_if_given(const CallGeometry& call) {
  const auto* const dims = std::get_if<std::vector<int64_t>>(&call.plain[1]);
  Along along = reduced<1>(call);
  if (dims != nullptr && dims->empty()) along.dims.clear();
  return along;
}

}  // namespace

void add_reduction_ways(WaysTable& table) {
  const ReducedTerms sum{Op::kSum, {Op::kSum, Op::kAvg}}, count{Op::kSum, {}};
  const ReducedTerms product{Op::kProduct, {Op::kProduct}};
  const ReducedTerms greatest{Op::kMax, {Op::kMax}}, least{Op::kMin, {Op::kMin}};
  for (const char* name : {"sum.", "mean."}) table[name] = reduction(all_reduced, {sum});
  for (const char* name : {"sum.dim_IntList", "mean.dim"})
    table[name] = reduction(reduced<1>, {sum});
  table["nansum."] = reduction(reduced<1>, {count});
  for (const char* name : {"count_nonzero.", "count_nonzero.dim_IntList"})
    table[name] = reduction(gone<1>, {count});
  table["prod."] = reduction(all_reduced, {product});
  table["prod.dim_int"] = reduction(reduced<1>, {product});
  for (const char* name : {"any.", "max."}) table[name] = reduction(all_reduced, {greatest});
  for (const char* name : {"any.dim", "amax."}) table[name] = reduction(reduced<1>, {greatest});
  for (const char* name : {"all.", "min."}) table[name] = reduction(all_reduced, {least});
  for (const char* name : {"all.dim", "amin."}) table[name] = reduction(reduced<1>, {least});
  table["any.dims"] = reduction(reduced_if_given, {greatest});
  table["all.dims"] = reduction(reduced_if_given, {least});
  table["aminmax."] = reduction(reduced<1>, {{Op::kMin, {}}, {Op::kMax, {}}});
}

}  // namespace fsdp::internal
