#include "device_mesh/collectives/backend/row_gather.h"

#include "device_mesh/collectives/backend/abandoned.h"
#include "device_mesh/collectives/backend/point_to_point.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::internal {

RowGather::RowGather(const Group& group, const at::Tensor& row, int tag)
    : group_(group),
      rank_(group_rank(group_)),
      size_(group_size(group_)),
      rows_(std::make_shared<Rows>(
          Rows{row, scratch_memory({size_ - 1, row.numel()}, row.scalar_type(), row.device())})) {
  if (row.numel() == 0) return;
  for (int64_t distance = 1; distance < size_; ++distance) {
    const auto from = (rank_ + size_ - distance) % size_;
    messages_.push_back(
        receive(group_, rows_->received.select(0, from < rank_ ? from : from - 1), from, tag));
  }
  for (int64_t distance = 1; distance < size_; ++distance)
    messages_.push_back(send(group_, rows_->own, (rank_ + distance) % size_, tag));
}

void RowGather::wait(const std::string& what) {
  try {
    for (auto& message : messages_) message.wait(what);
  } catch (...) {
    abandon();
    throw;
  }
}

void RowGather::abandon() {
  for (auto& message : messages_) internal::abandon(group_, message, rows_);
}

const char* RowGather::row(int64_t rank) const {
  if (rank == rank_) return static_cast<const char*>(rows_->own.const_data_ptr());
  const auto place = rank < rank_ ? rank : rank - 1;
  return static_cast<const char*>(rows_->received.const_data_ptr()) + place * rows_->own.numel();
}

}  // namespace fsdp::internal
