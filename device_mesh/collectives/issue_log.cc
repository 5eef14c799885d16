#include "device_mesh/collectives/issue_log.h"

#include "device_mesh/collectives/announcement.h"
#include "device_mesh/collectives/failure_words.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/internal/text_of_error.h"
#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// A group of two backends has a log for host memory and one for its device.
using LogsOfGroup = std::array<std::shared_ptr<IssueLog>, 2>;

// The collective this process issued last, for the case that the transport ends the
// process instead of throwing: it is then printed to stderr before the process ends.
struct LastIssued {
  std::mutex mutex;
  std::string what;
  uint32_t sequence = 0;
  int64_t rank = 0;
  std::terminate_handler previous = nullptr;
};

LastIssued& last_issued() {
  static auto& instance = *new LastIssued();  // leaked: read while the process ends
  return instance;
}

[[noreturn]] void print_and_terminate() {
  auto& last = last_issued();
  if (last.mutex.try_lock()) {
    std::fprintf(stderr, "fsdp: the process is ending; rank %lld issued last: %s (sequence %u)\n",
                 static_cast<long long>(last.rank), last.what.c_str(), last.sequence);
    std::fflush(stderr);
  }
  if (last.previous != nullptr) last.previous();
  std::abort();
}

// The first call puts a printer in front of the terminate handler in place.
void record_issued(const std::string& what, uint32_t sequence, int64_t global_rank) {
  auto& last = last_issued();
  const std::lock_guard lock(last.mutex);
  static const bool installed = (last.previous = std::set_terminate(&print_and_terminate), true);
  static_cast<void>(installed);
  last.what = what;
  last.sequence = sequence;
  last.rank = global_rank;
}

std::string failure_of(const std::string& reason) {
  return "an earlier collective of its process group failed (" + reason +
         "). Destroy the process group and start anew on every rank";
}

}  // namespace

std::shared_ptr<IssueLog> IssueLog::of(const Group& group, c10::DeviceType device_type) {
  return log_of(group, device_type != c10::kCPU);
}

std::shared_ptr<IssueLog> IssueLog::log_of(const Group& group, bool on_device) {
  static auto& kept = *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, LogsOfGroup>();
  return kept.with(group, [&](LogsOfGroup& logs) {
    auto& log = logs[on_device ? 1 : 0];
    if (!log) log = std::make_shared<IssueLog>(group, on_device);
    return log;
  });
}

struct IssueLog::WeakGroup {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> pointer;
};

IssueLog::IssueLog(const Group& group, bool on_device)
    : IssueLog(group, !on_device && group_backend(group) != "fake", std::make_shared<Shared>()) {
  shared_->store = group->getStore();
}

IssueLog::IssueLog(const Group& group, bool tells, std::shared_ptr<Shared> shared)
    : group_(std::make_shared<const WeakGroup>(
          WeakGroup{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)})),
      group_size_(group_size(group)),
      ranks_(ranks_in_job(group)),
      global_rank_(ranks_[static_cast<size_t>(group_rank(group))]),
      tells_(group_size_ > 1 && tells),
      shared_(std::move(shared)),
      lane_(static_cast<uint32_t>(shared_->lanes.size())),
      watched_(watched(group)) {
  const std::lock_guard lock(shared_->mutex);
  shared_->lanes.push_back(group_);
}

std::shared_ptr<WatchedLane> IssueLog::watched(const Group& group) const {
  const auto name = tells_ ? name_in_job(group) : std::nullopt;
  if (!name) return nullptr;
  const auto refuse = [weak = std::weak_ptr<Shared>(shared_)](const std::string& reason) {
    if (const auto shared = weak.lock()) shared->refuse_from_now_on(failure_of(reason));
  };
  return WatchedRank::of(*name, global_rank_)->add_lane(name->group, shared_->issuers, refuse);
}

std::shared_ptr<IssueLog> IssueLog::beside(const Group& side) const {
  if (const auto group = group_->pointer.lock()) set_ranks_in_job(side, ranks_in_job(group));
  return std::shared_ptr<IssueLog>(new IssueLog(side, tells_, shared_));
}

void IssueLog::check_usable(const std::string& what) {
  const std::lock_guard lock(shared_->mutex);
  TORCH_CHECK(shared_->failure.empty(), "the ", what, " can not go on: ", shared_->failure,
              " (rank ", global_rank_, ")");
}

Stamp IssueLog::record(const IssuedOperation& operation) {
  check_usable(operation.what);
  const std::lock_guard lock(order_mutex_);
  const auto stamp = order_.next(operation.unit, operation.kind, operation.bytes);
  last_stamp_ = stamp;
  record_issued(operation.what, stamp.sequence(), global_rank_);
  const std::lock_guard record_lock(shared_->mutex);
  shared_->record.add({lane_, stamp.sequence(), operation.what, operation.bytes, operation.kind});
  return stamp;
}

Stamp IssueLog::last_stamp() const {
  const std::lock_guard lock(order_mutex_);
  return last_stamp_;
}

std::vector<RecordedOperation> IssueLog::recent_operations() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->record.operations();
}

Announcement IssueLog::announce(const IssuedOperation& operation, const at::Tensor& payloads) {
  Notice notice = {.stamp = record(operation),
                   .words = operation.words,
                   .global_rank = global_rank_,
                   .operation = operation.what};
  auto group = group_->pointer.lock();
  if (!tells_) group = {};
  auto awaited = watched_ ? watched_->issue(operation.what) : nullptr;
  return {shared_from_this(), std::move(notice), group, payloads, std::move(awaited)};
}

void IssueLog::await_message(Pending& message, const std::shared_ptr<AwaitedOperation>& awaited,
                             const std::string& what) const {
  const bool is_watched = awaited && message.peer() >= 0;
  if (is_watched) awaited->waits_for(ranks_[static_cast<size_t>(message.peer())], message.work());
  const auto has_come = [&] {
    try {
      return message.wait_unless_aborted(what);
    } catch (const c10::Error&) {
      // Another rank may have learned first that this wait can not end, and left.
      if (!is_watched || awaited->verdict().empty()) throw;
      return false;
    }
  };
  if (has_come()) return;
  const auto verdict = is_watched ? awaited->verdict() : std::string();
  TORCH_CHECK(false, verdict.empty() ? "it was aborted" : verdict, ". Nothing was changed by the ",
              what, " on this rank (rank ", global_rank_, ")");
}

void IssueLog::await_apart(Pending message, const std::string& what) {
  const auto awaited = watched_ ? watched_->wait_apart(what) : nullptr;
  watch([&] {
    check_usable(what);
    const WaitScope scope(awaited);
    await_message(message, awaited, what);
  });
}

void IssueLog::note_failure(const std::exception& error) {
  shared_->refuse_from_now_on(failure_of(text_of(error)));
}

// Ranks of this host that wait for this one, in a collective of any of the logs, wait no
// more.
void IssueLog::tell_peers(const c10::Error& error) const {
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->failure.empty()) return;
  for (const auto& lane : shared_->lanes) {
    const auto group = lane->pointer.lock();
    const auto channel = group ? PeerChannel::of(group) : nullptr;
    try {
      if (channel) channel->send_failure(error.what_without_backtrace());
    } catch (const std::exception&) {
      // No memory for it: they learn when this rank leaves.
    }
  }
}

// Ranks that wait for one another in different collectives, a gather here and a reduction
// there, learn of it here.
void IssueLog::add_word_of_others(c10::Error& error) {
  const auto group = group_->pointer.lock();
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->failure.empty() || !shared_->store || !group) return;
  }
  const std::string text = error.what_without_backtrace();
  const auto operation = text.substr(0, text.find(" failed on rank "));
  std::map<int64_t, std::vector<RecordedOperation>> records;
  const auto hear = [&](int64_t rank, const std::optional<std::string>& word) {
    if (!word) return;
    const auto end = word->find('\n');
    records[rank] = parse_operations(word->substr(end));
    if (rank == global_rank_) return;
    error.add_context(c10::str("rank ", rank, " failed in the ", word->substr(0, end)));
  };
  try {
    std::vector<int64_t> gone;
    for (const auto peer : gone_peers(group)) gone.push_back(ranks_[static_cast<size_t>(peer)]);
    exchange_failure_words(shared_->store,
                           {.topic = "failed operation",
                            .own = global_rank_,
                            .word = operation + "\n" + to_text(recent_operations()),
                            .ranks = ranks_in_job(group),
                            .gone = gone},
                           hear);
    const auto difference = first_difference(records);
    if (!difference.empty()) error.add_context("the ranks part first at " + difference);
  } catch (const std::exception&) {
    // The store can not be asked, as the error says already (pending.cc).
  }
}

void IssueLog::Shared::refuse_from_now_on(const std::string& reason) {
  const std::lock_guard lock(mutex);
  if (failure.empty()) failure = reason;
}

void IssueLog::end(const Group& group) {
  for (const bool on_device : {false, true}) {
    log_of(group, on_device)
        ->shared_->refuse_from_now_on("destroy_process_group() has ended its process group");
  }
}

}  // namespace fsdp::internal
