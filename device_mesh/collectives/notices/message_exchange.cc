#include "device_mesh/collectives/notices/message_exchange.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kNotice = kNoticeBytes;

// Rows of the notice, each followed by its rider: uint8 [riders, notice + rider].
at::Tensor messages_of(const Notice& notice, const at::Tensor& riders) {
  const auto count = riders.defined() ? riders.size(0) : 1;
  const auto bytes = riders.defined() ? riders.size(1) : 0;
  const auto head = write_notice(notice);
  auto messages = scratch_memory({count, kNotice + bytes}, at::kByte, c10::kCPU);
  auto* to = static_cast<char*>(messages.mutable_data_ptr());
  const auto* from = bytes > 0 ? static_cast<const char*>(riders.const_data_ptr()) : nullptr;
  for (int64_t row = 0; row < count; ++row, to += kNotice + bytes) {
    std::memcpy(to, head.data(), head.size());
    if (bytes > 0)
      std::memcpy(to + kNotice, from + row * riders.stride(0), static_cast<size_t>(bytes));
  }
  return messages;
}

}  // namespace

int64_t rider_room(int64_t group_size) {
  constexpr int64_t kLeast = 4 << 10, kMost = 128 << 10, kOfAll = 1 << 20;
  return std::clamp(kOfAll / group_size / 64 * 64, kLeast, kMost);
}

MessageExchange::MessageExchange(const Group& group, const Notice& notice, const at::Tensor& riders)
    : rank_(group_rank(group)),
      size_(group_size(group)),
      outgoing_(messages_of(notice, riders)),
      incoming_(scratch_memory({size_, kNotice + rider_room(size_)}, at::kByte, c10::kCPU)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (int64_t distance = 1; distance < size_; ++distance) {
    const auto from = (rank_ + size_ - distance) % size_;
    messages_.push_back(receive(group, incoming_.select(0, from), from, kNoticeTag));
  }
  for (int64_t distance = 1; distance < size_; ++distance) {
    const auto to = (rank_ + distance) % size_;
    const auto row = outgoing_.size(0) == 1 ? 0 : to;
    messages_.push_back(send(group, outgoing_.select(0, row), to, kNoticeTag));
  }
}

const char* MessageExchange::notice(int64_t rank) const {
  return static_cast<const char*>(incoming_.const_data_ptr()) + rank * incoming_.size(1);
}

at::Tensor MessageExchange::rider(int64_t rank) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto own = outgoing_.size(0) == 1 ? 0 : rank_;
  const auto message = rank == rank_ ? outgoing_.select(0, own) : incoming_.select(0, rank);
  return message.narrow(0, kNotice, outgoing_.size(1) - kNotice);
}

int64_t MessageExchange::staging_bytes() const {
  return (outgoing_.size(0) + size_ - 1) * (outgoing_.size(1) - kNotice);
}

std::shared_ptr<const void> MessageExchange::memory() const {
  return std::make_shared<std::pair<at::Tensor, at::Tensor>>(outgoing_, incoming_);
}

}  // namespace fsdp::internal
