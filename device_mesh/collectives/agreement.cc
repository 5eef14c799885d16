#include "device_mesh/collectives/agreement.h"

#include <ATen/ops/tensor.h>

namespace fsdp::internal {
namespace {

std::optional<WordDifference> first_difference(const at::Tensor& words) {
  const auto* const first = words.const_data_ptr<int64_t>();
  const int64_t ranks = words.size(0), count = words.size(1);
  for (int64_t word = 0; word < count; ++word) {
    for (int64_t rank = 1; rank < ranks; ++rank) {
      if (first[rank * count + word] != first[word])
        return WordDifference{static_cast<size_t>(word), rank};
    }
  }
  return std::nullopt;
}

}  // namespace

at::Tensor rows_of_all(const std::vector<Collectives>& dims, const RowsOptions& options) {
  auto shape = options.row.sizes().vec();
  shape.insert(shape.begin(), -1);
  at::Tensor rows = options.row;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (dim->size() > 1)
      rows = dim->rows_of_ranks({.row = rows, .what = options.what, .call = options.call});
  }
  return rows.reshape(shape);
}

Agreement agree(const std::vector<Collectives>& dims, const AgreeOptions& options) {
  const at::Tensor own = at::tensor(options.words, c10::kLong).to(options.device);
  const at::Tensor words =
      rows_of_all(dims, {.row = own, .what = options.what, .call = options.what})
          .cpu()
          .contiguous();
  return {words, first_difference(words)};
}

}  // namespace fsdp::internal
