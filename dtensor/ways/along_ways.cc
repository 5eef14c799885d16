#include "dtensor/ways/along_ways.h"

#include "dtensor/ways/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_among(int64_t dim, const Along& along) {
  return std::find(along.dims.begin(), along.dims.end(), dim) != along.dims.end();
}

int64_t dim_after(int64_t dim, const Along& along) {
  if (along.then != Along::Then::kGo) return dim;
  return dim - std::count_if(along.dims.begin(), along.dims.end(),
                             [dim](int64_t gone) { return gone < dim; });
}

std::vector<int64_t> every_dim(int64_t ndim) {
  std::vector<int64_t> dims(static_cast<size_t>(ndim));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

// tril, triu: both dimensions of the matrices.
Along matrices(const CallGeometry& call) {
  const int64_t ndim = call.operands[0].ndim();
  return {.dims = {ndim - 2, ndim - 1}};
}

OperatorWays along(AlongOf of, size_t results = 1) {
  return {.ways = [=](const CallGeometry& call) { return along_ways(call, of(call), results); },
          .results =
              [=](const CallGeometry& call) {
                return std::vector<ResultGeometry>(results, along_result(call, of(call)));
              }};
}

// topk(self, k, dim, ...): the dimension becomes k elements long.
std::vector<ResultGeometry> topk_results(const CallGeometry& call) {
  auto shape = call.operands[0].shape;
  if (!shape.empty()) shape[static_cast<size_t>(given_dims(call, 2)[0])] = call.number(1);
  return {contiguous(shape), contiguous(shape)};
}

}  // namespace

std::vector<int64_t> given_dims(const PlainArgument& argument, int64_t ndim) {
  std::vector<int64_t> dims;
  if (const auto* const dim = std::get_if<int64_t>(&argument)) dims = {*dim};
  if (const auto* const list = std::get_if<std::vector<int64_t>>(&argument)) dims = *list;
  for (int64_t& dim : dims) dim = wrapped_dim(dim, ndim);
  return dims.empty() ? every_dim(ndim) : dims;
}

std::vector<int64_t> given_dims(const CallGeometry& call, size_t place) {
  return given_dims(call.plain[place], call.operands[0].ndim());
}

Along all_reduced(const CallGeometry& call) {
  return {.dims = every_dim(call.operands[0].ndim()), .then = Along::Then::kGo};
}

std::vector<Way> along_ways(const CallGeometry& call, const Along& along, size_t results) {
  std::vector<Way> ways;
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (is_among(d, along)) continue;
    ways.push_back({.results = std::vector<Placement>(results, Shard{dim_after(d, along)}),
                    .operands = std::vector<Placement>(call.operands.size(), Shard{d})});
  }
  return ways;
}

ResultGeometry along_result(const CallGeometry& call, const Along& along) {
  const Operand& self = call.operands[0];
  if (along.then == Along::Then::kStay) return laid_as(self.shape, self.stride);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (!is_among(d, along)) shape.push_back(self.size(d));
    if (is_among(d, along) && along.then == Along::Then::kBecomeOne) shape.push_back(1);
  }
  return contiguous(std::move(shape));
}

void add_along_ways(WaysTable& table) {
  for (const char* name : {"_softmax.", "_log_softmax.", "_safe_softmax.", "cumsum.", "cumsum_.",
                           "cumprod.", "cumprod_.", "logcumsumexp.", "flip."}) {
    table[name] = along(kept<1>);
  }
  for (const char* name : {"_softmax_backward_data.", "_log_softmax_backward_data."})
    table[name] = along(kept<2>);
  for (const char* name : {"cummax.", "cummin.", "sort."}) table[name] = along(kept<1>, 2);
  table["sort.stable"] = along(kept<2>, 2);
  table["roll."] = along(kept<2>);
  for (const char* name : {"tril.", "tril_.", "triu.", "triu_."}) table[name] = along(matrices);
  for (const char* name : {"max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode."})
    table[name] = along(reduced<1>, 2);
  table["kthvalue."] = along(reduced<2>, 2);
  for (const char* name : {"argmax.", "argmin.", "logsumexp."}) table[name] = along(reduced<1>);
  for (const char* name : {"median.", "nanmedian."}) table[name] = along(all_reduced);
  table["topk."] = {
      .ways = [](const CallGeometry& call) { return along_ways(call, kept<2>(call), 2); },
      .results = topk_results};
}

}  // namespace fsdp::internal
