#include "device_mesh/collectives/announcement.h"

#include "device_mesh/collectives/backend/abandoned.h"
#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/point_to_point.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/piggybacked_word.h"
#include "device_mesh/collectives/ranks_in_job.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/watched_rank.h"

#include <ATen/core/LegacyTypeDispatch.h>
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

std::string describe(const Notice& notice) {
  return c10::str("the ", notice.operation, " (sequence ", notice.stamp.sequence(), ")");
}

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

Announcement::Announcement(std::shared_ptr<IssueLog> log, Notice notice, const Group& group,
                           const at::Tensor& riders, std::shared_ptr<AwaitedOperation> awaited)
    : log_(std::move(log)), mine_(std::move(notice)), group_(group), awaited_(std::move(awaited)) {
  if (!group_) return;
  rank_ = group_rank(group_);
  if (has_gloo(group_)) {
    post(riders);
  } else {
    gather_notices();
  }
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

void Announcement::gather_notices() {
  outgoing_ = messages_of(mine_, {});
  incoming_ = scratch_memory({group_size(group_), kNotice}, at::kByte, c10::kCPU);
  messages_.push_back(all_gather(group_, incoming_, outgoing_));
}

void Announcement::post(const at::Tensor& riders) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto size = group_size(group_);
  outgoing_ = messages_of(mine_, riders);
  incoming_ = scratch_memory({size, kNotice + rider_room(size)}, at::kByte, c10::kCPU);
  for (int64_t distance = 1; distance < size; ++distance) {
    const auto from = (rank_ + size - distance) % size;
    messages_.push_back(receive(group_, incoming_.select(0, from), from, kNoticeTag));
  }
  for (int64_t distance = 1; distance < size; ++distance) {
    const auto to = (rank_ + distance) % size;
    const auto row = outgoing_.size(0) == 1 ? 0 : to;
    messages_.push_back(send(group_, outgoing_.select(0, row), to, kNoticeTag));
  }
}

void Announcement::wait_for_messages(const IssueLog& log) {
  const WaitScope scope(awaited_);
  for (auto& message : messages_) {
    const bool is_watched = awaited_ && message.peer() >= 0;
    if (is_watched)
      awaited_->await(log.ranks()[static_cast<size_t>(message.peer())], message.work());
    const auto has_come = [&] {
      try {
        return message.wait_unless_aborted(mine_.operation);
      } catch (const c10::Error&) {
        // Another rank may have learned first that this wait can not end, and left.
        if (!is_watched || awaited_->verdict().empty()) throw;
        return false;
      }
    };
    if (has_come()) continue;
    const auto verdict = is_watched ? awaited_->verdict() : std::string();
    TORCH_CHECK(false, verdict.empty() ? "it was aborted" : verdict,
                ". Nothing was changed by the ", mine_.operation, " on this rank (rank ",
                mine_.global_rank, ")");
  }
  if (awaited_) awaited_->await(-1, {});
}

std::vector<NoticeWords> Announcement::wait() {
  const auto log = std::exchange(log_, nullptr);
  if (!group_) return {mine_.words};
  return log->watch([&] {
    try {
      log->check_usable(mine_.operation);  // a failed group's other ranks need not come
      wait_for_messages(*log);
    } catch (...) {
      const auto memory = std::make_shared<std::pair<at::Tensor, at::Tensor>>(outgoing_, incoming_);
      for (auto& message : messages_) abandon(group_, message, memory);
      throw;
    }
    std::vector<NoticeWords> words;
    for (int64_t peer = 0; peer < group_size(group_); ++peer)
      words.push_back(peer == rank_ ? mine_.words : read(peer).words);
    if (auto* const beside = PiggybackedWord::current()) beside->heard(words);
    return words;
  });
}

std::vector<at::Tensor> Announcement::riders() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto bytes = outgoing_.size(1) - kNotice;
  const auto own = outgoing_.size(0) == 1 ? 0 : rank_;
  std::vector<at::Tensor> riders;
  for (int64_t rank = 0; rank < incoming_.size(0); ++rank) {
    const auto message = rank == rank_ ? outgoing_.select(0, own) : incoming_.select(0, rank);
    riders.push_back(message.narrow(0, kNotice, bytes));
  }
  return riders;
}

Notice Announcement::read(int64_t peer) const {
  Notice theirs;
  const auto* const first = static_cast<const char*>(incoming_.const_data_ptr());
  TORCH_CHECK(read_notice(first + peer * incoming_.size(1), theirs),
              "collectives are out of order: what rank ",
              ranks_in_job(group_)[static_cast<size_t>(peer)],
              " sent is no notice of a collective, where rank ", mine_.global_rank, " issued ",
              describe(mine_));
  TORCH_CHECK(
      theirs.stamp == mine_.stamp, "collectives are out of order: rank ", theirs.global_rank,
      " issued ", describe(theirs), " where rank ", mine_.global_rank, " issued ", describe(mine_),
      theirs.operation == mine_.operation ? ", of another size or after a different history" : "",
      ". Every rank must issue the same collectives in the same order: touch the sharded "
      "units alike. Nothing was changed by it on this rank; the other ranks of the group "
      "fail alike or time out");
  return theirs;
}

}  // namespace fsdp::internal
