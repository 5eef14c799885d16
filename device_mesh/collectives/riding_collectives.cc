#include "device_mesh/collectives/riding_collectives.h"

#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/sum_in_order.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

at::Tensor rows_of(const at::Tensor& tensor, int64_t rows) {
  return tensor_bytes(tensor).view({rows, -1});
}

void copy_bytes(void* to, const at::Tensor& from) {
  std::memcpy(to, from.const_data_ptr(), from.nbytes());
}

Announcement announced(IssueLog& log, const IssuedOperation& operation, const at::Tensor& riders) {
  auto announcement = log.announce(operation, riders);
  announcement.wait();
  return announcement;
}

}  // namespace

void riding_rows(IssueLog& log, const IssuedOperation& operation, const at::Tensor& input,
                 int64_t rows, const at::Tensor& output) {
  const BelowAutograd below_autograd;
  const auto announcement = announced(log, operation, rows_of(input, rows));
  auto* to = static_cast<char*>(output.mutable_data_ptr());
  for (const auto& rider : announcement.riders()) {
    copy_bytes(to, rider);
    to += rider.nbytes();
  }
}

void riding_reduce_scatter(IssueLog& log, const IssuedOperation& operation, int64_t group_size,
                           const ReduceScatterOptions& options) {
  const BelowAutograd below_autograd;
  const auto announcement = announced(log, operation, rows_of(options.input, group_size));
  options.output.view({-1}).copy_(sum_in_order(announcement.riders(), options.input.scalar_type()));
}

// In pieces, since the root copies what it sends: it is at most one of them ahead.
void riding_broadcast(IssueLog& log, const IssuedOperation& operation, int64_t rank,
                      const BroadcastOptions& options) {
  constexpr int64_t kPiece = 4 << 20;  // bytes
  const BelowAutograd below_autograd;
  const bool is_root = rank == options.root;
  const auto bytes = tensor_bytes(options.tensor);
  for (int64_t sent = 0; sent < bytes.numel(); sent += kPiece) {
    const auto piece = bytes.narrow(0, sent, std::min(kPiece, bytes.numel() - sent));
    const auto announcement = announced(log, operation, is_root ? rows_of(piece, 1) : at::Tensor());
    if (!is_root)
      copy_bytes(piece.mutable_data_ptr(),
                 announcement.riders()[static_cast<size_t>(options.root)]);
  }
}

}  // namespace fsdp::internal
