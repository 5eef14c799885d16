#include "device_mesh/collectives/announcement.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/watched_rank.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kNotice = kNoticeBytes;

// Rows of the notice, each followed by its payload: uint8 [payloads, notice + payload].
at::Tensor messages_of(const Notice& notice, const at::Tensor& payloads) {
  const auto count = payloads.defined() ? payloads.size(0) : 1;
  const auto bytes = payloads.defined() ? payloads.size(1) : 0;
  const auto head = write_notice(notice);
  auto messages = scratch_memory({count, kNotice + bytes}, at::kByte, c10::kCPU);
  auto* to = static_cast<char*>(messages.mutable_data_ptr());
  const auto* from = bytes > 0 ? static_cast<const char*>(payloads.const_data_ptr()) : nullptr;
  for (int64_t row = 0; row < count; ++row, to += kNotice + bytes) {
    std::memcpy(to, head.data(), head.size());
    if (bytes > 0)
      std::memcpy(to + kNotice, from + row * payloads.stride(0), static_cast<size_t>(bytes));
  }
  return messages;
}

// Through Gloo: a message to every rank, received in room for the largest, so it meets
// the others' whatever they announce. A message costs more than its bytes as long as
// these are few, so the data of small operations travels in it.
class MessageExchange final : public NoticeExchange {
 public:
  MessageExchange(const Group& group, const Notice& notice, const at::Tensor& payloads);

  const char* notice(int64_t rank) const override;
  at::Tensor payload(int64_t rank) const override;
  int64_t staging_bytes() const override;
  std::shared_ptr<const void> memory() const override;

 private:
  int64_t rank_, size_;
  at::Tensor outgoing_;  // uint8 [1 or group size, notice and payload]
  at::Tensor incoming_;  // uint8 [group size, notice and room], by sender
};

MessageExchange::MessageExchange(const Group& group, const Notice& notice,
                                 const at::Tensor& payloads)
    : rank_(group_rank(group)),
      size_(group_size(group)),
      outgoing_(messages_of(notice, payloads)),
      incoming_(scratch_memory({size_, kNotice + payload_room(size_)}, at::kByte, c10::kCPU)) {
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

at::Tensor MessageExchange::payload(int64_t rank) const {
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

// Among ranks that share memory. A payload of any size is read where its sender has it,
// without a copy where it lies in Collectives::row_memory(); as long as somebody reads
// it, its memory is not used for anything else. Nothing but a receiver waits.
class PeerExchange final : public NoticeExchange {
 public:
  PeerExchange(const Group& group, std::shared_ptr<PeerChannel> channel, const Notice& notice,
               const at::Tensor& payloads);

  const char* notice(int64_t rank) const override;
  at::Tensor payload(int64_t rank) const override;
  int64_t staging_bytes() const override;
  std::shared_ptr<const void> memory() const override { return nullptr; }

 private:
  at::Tensor row_for(int64_t rank, const at::Tensor& rows) const;

  std::shared_ptr<PeerChannel> channel_;
  int64_t rank_;
  at::Tensor payloads_;                                    // as they were given
  at::Tensor sent_;                                        // where the others read them
  std::vector<c10::intrusive_ptr<PeerReceive>> received_;  // by rank; null for this one
};

PeerExchange::PeerExchange(const Group& group, std::shared_ptr<PeerChannel> channel,
                           const Notice& notice, const at::Tensor& payloads)
    : channel_(std::move(channel)),
      rank_(group_rank(group)),
      payloads_(payloads),
      received_(static_cast<size_t>(channel_->size())) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (payloads_.defined() && payloads_.numel() > 0) sent_ = channel_->memory().as_sent(payloads_);
  const auto number = channel_->next_number();
  const auto bytes = write_notice(notice);
  const auto size = channel_->size();
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

at::Tensor PeerExchange::payload(int64_t rank) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (rank == rank_) return payloads_.defined() ? row_for(rank, payloads_) : payloads_;
  const auto& body = received_[static_cast<size_t>(rank)]->message().body;
  return body.defined() || !payloads_.defined() ? body : at::empty({0}, payloads_.options());
}

int64_t PeerExchange::staging_bytes() const {
  return sent_.defined() ? static_cast<int64_t>(sent_.nbytes()) : 0;
}

// By an all-gather of another backend, without payloads. Ranks that announce different
// operations meet all the same.
class GatheredNotices final : public NoticeExchange {
 public:
  GatheredNotices(const Group& group, const Notice& notice);

  const char* notice(int64_t rank) const override;
  at::Tensor payload(int64_t) const override { return {}; }
  int64_t staging_bytes() const override { return 0; }
  std::shared_ptr<const void> memory() const override;

 private:
  at::Tensor own_, of_all_;
};

GatheredNotices::GatheredNotices(const Group& group, const Notice& notice)
    : own_(scratch_memory({1, kNoticeBytes}, at::kByte, c10::kCPU)),
      of_all_(scratch_memory({group_size(group), kNoticeBytes}, at::kByte, c10::kCPU)) {
  const auto bytes = write_notice(notice);
  std::memcpy(own_.mutable_data_ptr(), bytes.data(), bytes.size());
  messages_.push_back(all_gather(group, of_all_, own_));
}

const char* GatheredNotices::notice(int64_t rank) const {
  return static_cast<const char*>(of_all_.const_data_ptr()) + rank * of_all_.size(1);
}

std::shared_ptr<const void> GatheredNotices::memory() const {
  return std::make_shared<std::pair<at::Tensor, at::Tensor>>(own_, of_all_);
}

std::string describe(const Notice& notice) {
  return c10::str("the ", notice.operation, " (sequence ", notice.stamp.sequence(), ")");
}

}  // namespace

int64_t payload_room(int64_t group_size) {
  constexpr int64_t kLeast = 4 << 10, kMost = 128 << 10, kOfAll = 1 << 20;
  return std::clamp(kOfAll / group_size / 64 * 64, kLeast, kMost);
}

std::unique_ptr<NoticeExchange> exchange_notices(const Group& group, const Notice& notice,
                                                 const at::Tensor& payloads) {
  if (auto channel = PeerChannel::of(group))
    return std::make_unique<PeerExchange>(group, std::move(channel), notice, payloads);
  if (has_gloo(group)) return std::make_unique<MessageExchange>(group, notice, payloads);
  return std::make_unique<GatheredNotices>(group, notice);
}

Announcement::Announcement(std::shared_ptr<IssueLog> log, Notice notice, const Group& group,
                           const at::Tensor& payloads, std::shared_ptr<AwaitedOperation> awaited)
    : log_(std::move(log)), mine_(std::move(notice)), group_(group), awaited_(std::move(awaited)) {
  if (!group_) return;
  rank_ = group_rank(group_);
  exchange_ = exchange_notices(group_, mine_, payloads);
}

Announcement::Announcement(Announcement&&) noexcept = default;

Announcement::~Announcement() {
  if (!log_) return;
  try {
    wait();
  } catch (const std::exception&) {
    // The group's next user is told.
  }
}

std::vector<NoticeWords> Announcement::wait() {
  const auto log = std::exchange(log_, nullptr);
  if (!group_) return {mine_.words};
  return log->watch([&] {
    try {
      log->check_usable(mine_.operation);  // a failed group's other ranks need not come
      const WaitScope scope(awaited_);
      for (auto& message : exchange_->messages())
        log->await_message(message, awaited_, mine_.operation);
      if (awaited_) awaited_->waits_for(-1, {});
    } catch (...) {
      const auto memory = exchange_->memory();
      for (auto& message : exchange_->messages()) abandon(group_, message, memory);
      throw;
    }
    std::vector<NoticeWords> words;
    for (int64_t peer = 0; peer < group_size(group_); ++peer)
      words.push_back(peer == rank_ ? mine_.words : read(peer).words);
    return words;
  });
}

std::vector<at::Tensor> Announcement::payloads() const {
  std::vector<at::Tensor> payloads;
  for (int64_t rank = 0; rank < group_size(group_); ++rank)
    payloads.push_back(exchange_->payload(rank));
  return payloads;
}

Notice Announcement::read(int64_t peer) const {
  Notice theirs;
  TORCH_CHECK(read_notice(exchange_->notice(peer), theirs),
              "collectives are out of order: what rank ",
              ranks_in_job(group_)[static_cast<size_t>(peer)],
              " sent is no notice of a collective, where rank ", mine_.global_rank, " issued ",
              describe(mine_));
  TORCH_CHECK(
      theirs.stamp == mine_.stamp, "collectives are out of order: rank ", theirs.global_rank,
      " issued ", describe(theirs), " where rank ", mine_.global_rank, " issued ", describe(mine_),
      theirs.operation == mine_.operation ? ", of another size or after a different history" : "",
      ". Every rank must issue the same collectives in the same order: touch the sharded "
      "units alike (docs/launching.md says what a rank does that has less to do). "
      "Nothing was changed by it on this rank; the other ranks of the group fail alike or time "
      "out");
  return theirs;
}

}  // namespace fsdp::internal
