// softmax and log_softmax fit where another dimension than theirs is cut.
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

std::vector<Way> along_dim(const CallGeometry& call, int64_t dim, size_t operands) {
  const int64_t ndim = call.operands[0].ndim();
  std::vector<Way> ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d == wrapped_dim(dim, ndim)) continue;
    ways.push_back({{Shard{d}}, std::vector<Placement>(operands, Shard{d})});
  }
  return ways;
}

// _softmax(self, dim, half_to_float).
std::vector<Way> softmax_ways(const CallGeometry& call) {
  return along_dim(call, call.number(1), 1);
}

// _softmax_backward_data(grad, output, dim, input_dtype).
std::vector<Way> softmax_backward_ways(const CallGeometry& call) {
  return along_dim(call, call.number(2), 2);
}

std::vector<ResultGeometry> like_operand(const CallGeometry& call) {
  return {contiguous(call.operands[0].shape)};
}

}  // namespace

void add_softmax_ways(WaysTable& table) {
  for (const char* name : {"_softmax.", "_log_softmax.", "_safe_softmax."})
    table[name] = {.ways = softmax_ways, .results = like_operand};
  for (const char* name : {"_softmax_backward_data.", "_log_softmax_backward_data."})
    table[name] = {.ways = softmax_backward_ways, .results = like_operand};
}

}  // namespace fsdp::internal
