#include "device_mesh/collectives/notices/peer_exchange.h"

#include "device_mesh/peer_memory/peer_receive.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::internal {

PeerExchange::PeerExchange(const Group& group, std::shared_ptr<PeerChannel> channel,
                           const Notice& notice, const at::Tensor& riders)
    : channel_(std::move(channel)), rank_(group_rank(group)), riders_(riders) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (riders_.defined() && riders_.numel() > 0) sent_ = channel_->memory().as_sent(riders_);
  send(group, notice);
}

PeerExchange::~PeerExchange() = default;

void PeerExchange::send(const Group& group, const Notice& notice) {
  const auto number = channel_->next_number();
  const auto bytes = write_notice(notice);
  const auto size = group_size(group);
  received_.resize(static_cast<size_t>(size));
  for (int64_t distance = 1; distance < size; ++distance) {
    const auto to = (rank_ + distance) % size;
    channel_->send(to, number, bytes, sent_.defined() ? row_for(to, sent_) : at::Tensor());
  }
  for (int64_t distance = 1; distance < size; ++distance) {
    const auto from = (rank_ + size - distance) % size;
    auto& coming = received_[static_cast<size_t>(from)];
    coming = channel_->receive(from, number);
    messages_.push_back(std::move(Pending(group, coming).with_peer(from)));
  }
}

at::Tensor PeerExchange::row_for(int64_t rank, const at::Tensor& rows) const {
  return rows.select(0, rows.size(0) == 1 ? 0 : rank);
}

const char* PeerExchange::notice(int64_t rank) const {
  return received_[static_cast<size_t>(rank)]->message().notice.data();
}

at::Tensor PeerExchange::rider(int64_t rank) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (rank == rank_) return riders_.defined() ? row_for(rank, riders_) : riders_;
  const auto& body = received_[static_cast<size_t>(rank)]->message().body;
  return body.defined() || !riders_.defined() ? body : at::empty({0}, riders_.options());
}

int64_t PeerExchange::staging_bytes() const {
  return sent_.defined() ? static_cast<int64_t>(sent_.nbytes()) : 0;
}

}  // namespace fsdp::internal
