#include "device_mesh/collectives/issue_log.h"

#include "device_mesh/collectives/last_issued.h"
#include "device_mesh/internal/mesh_layout.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <exception>
#include <map>
#include <utility>

namespace fsdp::internal {
namespace {

struct KeptLog {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<IssueLog> log;
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
  auto log = std::make_shared<IssueLog>(group, ranks_along(mesh, dim));
  logs.emplace(group.get(), KeptLog{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), log});
  return log;
}

IssueLog::IssueLog(Group group, std::vector<int64_t> global_ranks)
    : group_(group),
      group_rank_(fsdp::internal::group_rank(group)),
      group_size_(group_size(group)),
      global_ranks_(std::move(global_ranks)) {}

Stamp IssueLog::record(const IssuedOperation& operation) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(failure_.empty(), operation.what,
              " can not be issued: an earlier collective of its process group failed (", failure_,
              "). Destroy the process group and start anew on every rank (rank ", global_rank(),
              ")");
  const auto stamp = order_.next(operation.unit, operation.kind, operation.bytes);
  record_issued(operation.what, stamp.sequence(), global_rank());
  return stamp;
}

Announcement IssueLog::announce(const IssuedOperation& operation) {
  Announcement announcement;
  announcement.log_ = shared_from_this();
  announcement.mine_ = {.stamp = record(operation),
                        .agreement = operation.agreement,
                        .global_rank = global_rank(),
                        .operation = operation.what};
  const auto group = group_.lock();
  if (group_size_ == 1 || !group) return announcement;
  announcement.sent_ = at::empty({static_cast<int64_t>(kNoticeBytes)}, at::kByte);
  announcement.received_ = at::empty({group_size_, static_cast<int64_t>(kNoticeBytes)}, at::kByte);
  const auto bytes = write_notice(announcement.mine_);
  std::memcpy(announcement.sent_.data_ptr(), bytes.data(), bytes.size());
  announcement.pending_ = all_gather(group, announcement.received_, announcement.sent_);
  return announcement;
}

void IssueLog::note_failure(const std::exception& error) {
  const auto* rich = dynamic_cast<const c10::Error*>(&error);
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = rich != nullptr ? rich->what_without_backtrace() : error.what();
}

std::vector<uint64_t> Announcement::wait() {
  if (!received_.defined()) return {mine_.agreement};
  try {
    pending_.wait(mine_.operation);
    std::vector<uint64_t> agreements;
    for (int64_t peer = 0; peer < received_.size(0); ++peer) {
      check(peer, static_cast<const char*>(received_.const_data_ptr()) + peer * received_.size(1),
            agreements);
    }
    return agreements;
  } catch (const std::exception& error) {
    log_->note_failure(error);
    throw;
  }
}

void Announcement::check(int64_t peer, const char* bytes, std::vector<uint64_t>& agreements) const {
  Notice theirs;
  TORCH_CHECK(read_notice(bytes, theirs), "collectives are out of order: what rank ",
              log_->global_rank(peer), " sent is no notice of a collective, where rank ",
              log_->global_rank(), " issued ", describe(mine_));
  TORCH_CHECK(theirs.stamp == mine_.stamp, "collectives are out of order: rank ",
              theirs.global_rank, " issued ", describe(theirs), " where rank ", log_->global_rank(),
              " issued ", describe(mine_),
              theirs.stamp.unit == mine_.stamp.unit ? ", after a different history" : "",
              ". Every rank must issue the same collectives in the same order: touch the sharded "
              "units alike. Nothing was changed by it on this rank; the other ranks of the mesh "
              "fail alike or time out");
  agreements.push_back(theirs.agreement);
}

}  // namespace fsdp::internal
