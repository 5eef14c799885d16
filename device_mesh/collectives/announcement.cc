#include "device_mesh/collectives/announcement.h"

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/watched_rank.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

std::string describe(const Notice& notice) {
  return c10::str("the ", notice.operation, " (sequence ", notice.stamp.sequence(), ")");
}

}  // namespace

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
      for (auto& message : exchange_->messages()) log->await(message, awaited_, mine_.operation);
      if (awaited_) awaited_->await(-1, {});
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
