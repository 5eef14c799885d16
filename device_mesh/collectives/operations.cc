#include "device_mesh/collectives/operations.h"

#include <ATen/ops/empty.h>

namespace fsdp::internal {

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

at::Tensor sum_in_order(const std::vector<at::Tensor>& rows, const Summands& summands) {
  const auto dtype = summands.dtype;
  if (summands.codes) {
    const auto& decode = summands.codes->decode;
    auto sum = decode(rows.front());
    for (size_t rank = 1; rank < rows.size(); ++rank) sum.add_(decode(rows[rank]));
    return sum;
  }
  const auto options = rows.front().options().dtype(sum_dtype(dtype));
  if (rows.front().numel() == 0) return at::empty({0}, options);
  if (rows.size() == 1) return rows.front().view(dtype).to(options, false, /*copy=*/true);
  // Two rows in one pass.
  auto sum = rows[0].view(dtype).to(options).add(rows[1].view(dtype));
  for (size_t rank = 2; rank < rows.size(); ++rank) sum.add_(rows[rank].view(dtype));
  return sum;
}

}  // namespace fsdp::internal
