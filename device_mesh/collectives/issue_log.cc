#include "device_mesh/collectives/issue_log.h"

#include "device_mesh/collectives/abandoned.h"
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/failure_words.h"
#include "device_mesh/collectives/last_issued.h"
#include "device_mesh/collectives/point_to_point.h"
#include "device_mesh/collectives/ranks_in_job.h"
#include "device_mesh/internal/mesh_layout.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

struct KeptLog {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group =
      c10::weak_intrusive_ptr<c10d::ProcessGroup>(Group());
  std::shared_ptr<IssueLog> log = nullptr;
};

struct Registry {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, KeptLog> logs;
};

Registry& registry() {
  static auto& instance = *new Registry();  // leaked: groups may die after static destruction began
  return instance;
}

std::vector<int64_t> ranks_along(const DeviceMesh& mesh, int64_t dim) {
  std::vector<int64_t> ranks;
  const auto row = MeshLayout::row_major(mesh.shape()).along({dim}, mesh.coordinate());
  for (const auto position : row.positions())
    ranks.push_back(mesh.ranks()[static_cast<size_t>(position)]);
  return ranks;
}

std::string describe(const Notice& notice) {
  return c10::str("the ", notice.operation, " (sequence ", notice.stamp.sequence(), ")");
}

}  // namespace

std::shared_ptr<IssueLog> IssueLog::of(const DeviceMesh& mesh, int64_t dim) {
  const auto& group = mesh.group(dim);
  std::lock_guard lock(registry().mutex);
  auto& logs = registry().logs;
  if (const auto found = logs.find(group.get()); found != logs.end()) return found->second.log;
  std::erase_if(logs, [](const auto& item) { return item.second.group.expired(); });
  set_ranks_in_job(group, ranks_along(mesh, dim));
  auto log = std::make_shared<IssueLog>(group, mesh.rank(), mesh.device_type() != c10::kCPU);
  logs.emplace(group.get(), KeptLog{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), log});
  return log;
}

struct IssueLog::WeakGroup {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> pointer;
};

IssueLog::IssueLog(const Group& group, int64_t global_rank, bool on_device)
    : IssueLog(group, global_rank, on_device, std::make_shared<Failure>()) {
  failure_->store = group->getStore();
}

IssueLog::IssueLog(const Group& group, int64_t global_rank, bool on_device,
                   std::shared_ptr<Failure> failure)
    : group_(std::make_shared<const WeakGroup>(
          WeakGroup{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)})),
      group_size_(group_size(group)),
      global_rank_(global_rank),
      on_device_(on_device),
      failure_(std::move(failure)) {}

std::shared_ptr<IssueLog> IssueLog::beside(const Group& side) const {
  if (const auto group = group_->pointer.lock()) set_ranks_in_job(side, ranks_in_job(group));
  return std::shared_ptr<IssueLog>(new IssueLog(side, global_rank_, on_device_, failure_));
}

void IssueLog::check_usable(const std::string& what) {
  std::lock_guard lock(failure_->mutex);
  TORCH_CHECK(failure_->reason.empty(), "the ", what, " can not go on: ", failure_->reason,
              " (rank ", global_rank_, ")");
}

Stamp IssueLog::record(const IssuedOperation& operation) {
  check_usable(operation.what);
  std::lock_guard lock(order_mutex_);
  const auto stamp = order_.next(operation.unit, operation.kind, operation.bytes);
  record_issued(operation.what, stamp.sequence(), global_rank_);
  return stamp;
}

Announcement IssueLog::announce(const IssuedOperation& operation) {
  Announcement announcement;
  announcement.mine_ = {.stamp = record(operation),
                        .agreement = operation.agreement,
                        .global_rank = global_rank_,
                        .operation = operation.what};
  announcement.log_ = shared_from_this();
  const auto group = group_->pointer.lock();
  if (group_size_ > 1 && !on_device_ && group) announcement.post(group);
  return announcement;
}

void IssueLog::note_failure(const std::exception& error) {
  const auto* rich = dynamic_cast<const c10::Error*>(&error);
  refuse_from_now_on(c10::str("an earlier collective of its process group failed (",
                              rich != nullptr ? rich->what_without_backtrace() : error.what(),
                              "). Destroy the process group and start anew on every rank"));
}

// Ranks that wait for one another in different collectives, a gather here and a reduction
// there, learn of it here.
void IssueLog::add_word_of_others(c10::Error& error) {
  const auto group = group_->pointer.lock();
  {
    std::lock_guard lock(failure_->mutex);
    if (!failure_->reason.empty() || !failure_->store || !group) return;
  }
  const std::string text = error.what_without_backtrace();
  const auto operation = text.substr(0, text.find(" failed on rank "));
  try {
    exchange_failure_words(*failure_->store, "failed operation", global_rank_, operation,
                           ranks_in_job(group),
                           [&](int64_t rank, const std::optional<std::string>& word) {
                             if (rank == global_rank_ || !word) return;
                             error.add_context(c10::str("rank ", rank, " failed in the ", *word));
                           });
  } catch (const std::exception&) {
    // The rank that serves the store is gone.
  }
}

void IssueLog::refuse_from_now_on(const std::string& reason) {
  std::lock_guard lock(failure_->mutex);
  if (failure_->reason.empty()) failure_->reason = reason;
}

void IssueLog::end(const Group& group) {
  std::lock_guard lock(registry().mutex);
  auto& kept = registry().logs[group.get()];
  if (!kept.log) {
    kept.group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
    kept.log = std::make_shared<IssueLog>(group, fsdp::internal::group_rank(group), false);
  }
  kept.log->refuse_from_now_on("destroy_process_group() has ended its process group");
}

void Announcement::post(const Group& group) {
  group_ = group;
  const auto size = group_size(group), rank = group_rank(group);
  const auto bytes = write_notice(mine_);
  notices_ = at::empty({size * static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!through_gloo(group, notices_)) {
    const auto own = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(own.mutable_data_ptr(), bytes.data(), bytes.size());
    messages_.push_back(all_gather(group, notices_, own));
    return;
  }
  const auto rows = notices_.view({size, -1});
  std::memcpy(rows[rank].mutable_data_ptr(), bytes.data(), bytes.size());
  for (int64_t distance = 1; distance < size; ++distance) {
    const auto from = (rank + size - distance) % size;
    messages_.push_back(receive(group, rows[from], from, kNoticeTag));
  }
  for (int64_t distance = 1; distance < size; ++distance)
    messages_.push_back(send(group, rows[rank], (rank + distance) % size, kNoticeTag));
}

Announcement::Announcement() = default;
Announcement::Announcement(Announcement&&) noexcept = default;

Announcement::~Announcement() {
  if (!log_) return;
  try {
    wait();
  } catch (const std::exception&) {
    // The group's next user is told.
  }
}

std::vector<uint64_t> Announcement::wait() {
  const auto log = std::exchange(log_, nullptr);
  if (!group_) return {mine_.agreement};
  return log->watch([&] {
    try {
      log->check_usable(mine_.operation);  // a failed group's other ranks need not come
      for (auto& message : messages_) message.wait(mine_.operation);
    } catch (...) {
      const auto memory = std::make_shared<at::Tensor>(notices_);
      for (auto& message : messages_) abandon(group_, message, memory);
      throw;
    }
    std::vector<uint64_t> agreements;
    for (int64_t peer = 0; peer < group_size(group_); ++peer)
      agreements.push_back(read(peer).agreement);
    return agreements;
  });
}

Notice Announcement::read(int64_t peer) const {
  Notice theirs;
  const auto* const first = static_cast<const char*>(notices_.const_data_ptr());
  TORCH_CHECK(read_notice(first + static_cast<size_t>(peer) * kNoticeBytes, theirs),
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
