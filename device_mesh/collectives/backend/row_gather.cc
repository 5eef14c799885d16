#include "device_mesh/collectives/backend/row_gather.h"

#include "device_mesh/collectives/backend/abandoned.h"
#include "device_mesh/collectives/backend/point_to_point.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::internal {

std::shared_ptr<const RowGather::Rows> RowGather::rows_of(const at::Tensor& row,
                                                          const std::vector<int64_t>& lengths,
                                                          int64_t rank, int64_t size) {
  std::vector<int64_t> offsets = {0};
  for (int64_t each = 0; each < size; ++each) {
    const auto length = lengths.empty() ? row.numel() : lengths[static_cast<size_t>(each)];
    offsets.push_back(offsets.back() + (each == rank ? 0 : length));
  }
  auto received = scratch_memory({offsets.back()}, row.scalar_type(), row.device());
  return std::make_shared<Rows>(Rows{row, std::move(received), std::move(offsets)});
}

RowGather::RowGather(const Group& group, const at::Tensor& row, const std::vector<int64_t>& lengths,
                     int tag)
    : group_(group),
      rank_(group_rank(group_)),
      size_(group_size(group_)),
      rows_(rows_of(row, lengths, rank_, size_)) {
  for (int64_t distance = 1; distance < size_; ++distance) {
    const auto from = (rank_ + size_ - distance) % size_;
    const auto place = place_of(from);
    if (place.numel() > 0) messages_.push_back(receive(group_, place, from, tag));
  }
  const auto own = sent(lengths);
  if (own.numel() == 0) return;
  for (int64_t distance = 1; distance < size_; ++distance)
    messages_.push_back(send(group_, own, (rank_ + distance) % size_, tag));
}

at::Tensor RowGather::sent(const std::vector<int64_t>& lengths) const {
  if (lengths.empty()) return rows_->own;
  return rows_->own.narrow(0, 0, lengths[static_cast<size_t>(rank_)]);
}

at::Tensor RowGather::place_of(int64_t rank) const {
  const auto first = rows_->offsets[static_cast<size_t>(rank)];
  return rows_->received.narrow(0, first, rows_->offsets[static_cast<size_t>(rank) + 1] - first);
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
  return static_cast<const char*>(rows_->received.const_data_ptr()) +
         rows_->offsets[static_cast<size_t>(rank)];
}

}  // namespace fsdp::internal
