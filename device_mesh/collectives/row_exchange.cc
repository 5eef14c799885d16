#include "device_mesh/collectives/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <exception>
#include <utility>

namespace fsdp::internal {

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

RowExchange::RowExchange(Group group, const at::Tensor& rows, at::ScalarType dtype,
                         std::string what)
    : group_(std::move(group)),
      dtype_(dtype),
      what_(std::move(what)),
      rank_(group_rank(group_)),
      size_(group_size(group_)),
      rows_(rows.unbind(0)),
      received_(rows_.size()),
      spare_(at::empty_like(rows_.front())) {
  received_[static_cast<size_t>(rank_)] = rows_[static_cast<size_t>(rank_)];
  start_round();
}

RowExchange::~RowExchange() {
  try {
    while (round_ < size_) end_round();
  } catch (const std::exception&) {
    // The group's next user is told.
  }
}

int64_t RowExchange::staging_bytes() const { return (size_ + 1) * spare_.numel(); }

int64_t RowExchange::peer(int64_t distance) const { return (rank_ + distance + size_) % size_; }

void RowExchange::start_round() {
  if (++round_ >= size_ || spare_.numel() == 0) {
    round_ = size_;
    return;
  }
  const auto to = peer(round_);
  pending_ = send_receive(group_, spare_, peer(-round_), rows_[static_cast<size_t>(to)], to);
}

void RowExchange::end_round() {
  try {
    pending_.wait(what_);
  } catch (...) {
    round_ = size_;  // the group has failed: no further rounds
    throw;
  }
  received_[static_cast<size_t>(peer(-round_))] = spare_;
  spare_ = rows_[static_cast<size_t>(peer(round_))];
  start_round();
}

void RowExchange::progress() {
  while (round_ < size_ && pending_.finished()) end_round();
}

at::Tensor RowExchange::term(size_t rank) const { return received_[rank].view(dtype_); }

at::Tensor RowExchange::wait() {
  while (round_ < size_) end_round();
  if (spare_.numel() == 0) return at::empty({0}, spare_.options().dtype(sum_dtype(dtype_)));
  auto sum = term(0).to(sum_dtype(dtype_), /*non_blocking=*/false, /*copy=*/true);
  for (size_t rank = 1; rank < received_.size(); ++rank) sum.add_(term(rank));
  return sum;
}

}  // namespace fsdp::internal
