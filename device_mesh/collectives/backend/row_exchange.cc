#include "device_mesh/collectives/backend/row_exchange.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <utility>

namespace fsdp::internal {

RowExchange::RowExchange(const Group& group, const at::Tensor& rows, Summands summands,
                         RowExchangeOptions options)
    : group_(group),
      summands_(std::move(summands)),
      options_(std::move(options)),
      rank_(group_rank(group_)),
      size_(group_size(group_)),
      rows_(rows.unbind(0)),
      received_(rows_.size()),
      spare_(scratch_memory(rows_.front().sizes(), rows_.front().scalar_type(),
                            rows_.front().device())) {
  received_[static_cast<size_t>(rank_)] = beginning_for(rank_, rows_[static_cast<size_t>(rank_)]);
  start_round();
  // c10d's messages can not be asked whether they have arrived, so a thread waits for
  // them. With one peer there is but one round, which needs nobody's help.
  if (options_.rounds == RowExchangeOptions::Rounds::kInBackground && size_ > 2)
    background_ = std::thread([this] { run_rounds(); });
}

RowExchange::~RowExchange() { finish(); }

// Not of spare_, which the rounds change meanwhile.
int64_t RowExchange::staging_bytes() const { return (size_ + 1) * rows_.front().numel(); }

int64_t RowExchange::peer(int64_t distance) const { return (rank_ + distance + size_) % size_; }

at::Tensor RowExchange::beginning_for(int64_t rank, const at::Tensor& row) const {
  if (options_.lengths.empty()) return row;
  return row.narrow(0, 0, options_.lengths[static_cast<size_t>(rank)]);
}

void RowExchange::start_round() {
  receiving_ = {};
  sending_ = {};
  if (round_ >= size_) return;
  const auto to = peer(round_);
  const auto sent = beginning_for(to, rows_[static_cast<size_t>(to)]);
  const auto received = beginning_for(rank_, spare_);
  if (received.numel() > 0) receiving_ = receive(group_, received, peer(-round_), options_.tag);
  if (sent.numel() > 0) sending_ = send(group_, sent, to, options_.tag);
}

void RowExchange::run_rounds() noexcept {
  try {
    if (options_.agree) options_.agree();
    for (; round_ < size_; start_round()) {
      receiving_.wait(options_.what);
      sending_.wait(options_.what);
      received_[static_cast<size_t>(peer(-round_))] = beginning_for(rank_, spare_);
      spare_ = rows_[static_cast<size_t>(peer(round_))];
      ++round_;
    }
  } catch (...) {
    failure_ = std::current_exception();
    abandon(group_, receiving_, std::make_shared<at::Tensor>(spare_));
    abandon(group_, sending_,
            std::make_shared<at::Tensor>(rows_[static_cast<size_t>(peer(round_))]));
  }
}

void RowExchange::finish() {
  if (std::exchange(finished_, true)) return;
  if (background_.joinable()) {
    const WaitScope scope(options_.awaited);
    background_.join();
  } else {
    run_rounds();
  }
}

at::Tensor RowExchange::wait() {
  finish();
  if (failure_) std::rethrow_exception(failure_);
  return sum_in_order(received_, summands_);
}

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
