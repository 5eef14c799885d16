#include "fully_shard/transport/row_exchange.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <exception>
#include <utility>

namespace fsdp::internal {

RowExchange::RowExchange(Group group, const at::Tensor& rows, at::ScalarType dtype)
    : group_(std::move(group)),
      dtype_(dtype),
      rank_(group_rank(group_)),
      world_(group_size(group_)),
      rows_(rows.unbind(0)),
      received_(rows_.size()),
      spare_(at::empty_like(rows_.front())) {
  received_[static_cast<size_t>(rank_)] = rows_[static_cast<size_t>(rank_)];
  start_round();
}

RowExchange::~RowExchange() {
  try {
    while (round_ < world_) end_round("reduce-scatter that nobody waits for");
  } catch (const std::exception&) {
    // The group's next user is told.
  }
}

int64_t RowExchange::staging_bytes() const { return (world_ + 1) * spare_.numel(); }

int64_t RowExchange::peer(int64_t distance) const { return (rank_ + distance + world_) % world_; }

void RowExchange::start_round() {
  if (++round_ == world_) return;
  const auto to = peer(round_);
  pending_ = send_receive(group_, spare_, peer(-round_), rows_[static_cast<size_t>(to)], to);
}

void RowExchange::end_round(const std::string& what) {
  try {
    pending_.wait(what);
  } catch (...) {
    round_ = world_;  // the group has failed: no further rounds
    throw;
  }
  received_[static_cast<size_t>(peer(-round_))] = spare_;
  spare_ = rows_[static_cast<size_t>(peer(round_))];
  start_round();
}

void RowExchange::progress(const std::string& what) {
  while (round_ < world_ && pending_.finished()) end_round(what);
}

ReducedRow RowExchange::wait(const std::string& what) {
  while (round_ < world_) end_round(what);
  ReducedRow result;
  for (const auto& row : received_) {
    std::memcpy(&result.stamps.emplace_back(),
                static_cast<const char*>(row.const_data_ptr()) + row.numel() - kStampRoom,
                sizeof(Stamp));
  }
  result.row = sum().view(at::kByte);
  return result;
}

at::Tensor RowExchange::sum() const {
  const auto term = [this](size_t rank) {
    const auto& row = received_[rank];
    return row.narrow(0, 0, row.numel() - kStampRoom).view(dtype_);
  };
  auto sum = received_.size() > 1 ? term(0).add(term(1)) : term(0).clone();
  for (size_t rank = 2; rank < received_.size(); ++rank) sum.add_(term(rank));
  return sum;
}

}  // namespace fsdp::internal
