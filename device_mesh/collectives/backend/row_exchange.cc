#include "device_mesh/collectives/backend/row_exchange.h"

#include "device_mesh/collectives/backend/abandoned.h"
#include "device_mesh/collectives/backend/point_to_point.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/sum_in_order.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <utility>

namespace fsdp::internal {

RowExchange::RowExchange(const Group& group, const at::Tensor& rows, at::ScalarType dtype,
                         RowExchangeOptions options)
    : group_(group),
      dtype_(dtype),
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
  if (options_.in_background && size_ > 2) background_ = std::thread([this] { run_rounds(); });
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
  return sum_in_order(received_, dtype_);
}

}  // namespace fsdp::internal
