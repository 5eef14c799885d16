// What one rank issues on one process group, in order, and the check that the other ranks
// issue the same.
//
//   auto log = IssueLog::of(mesh, 0);
//   Announcement announced = log->announce({.kind = CollectiveKind::kAllGather,
//                                           .what = "all-gather of unit 'l0'", .bytes = 352});
//   ...
//   announced.wait();   // throws, naming both operations, unless all ranks announced the same
//
// An announcement is a message of fixed size to every rank of the group, so it meets the
// others' whatever they issue. After a failure the ranks no longer agree on what was
// sent, and nothing more is announced. One log per process group, as long as that lives;
// found by the group, since ranks may be threads. Thread-safe, but for announce(), which
// is called in one order on all ranks. Messages give ranks of the whole job.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/notice.h"
#include "device_mesh/device_mesh.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::internal {

class IssueLog;

inline constexpr uint32_t kNoUnit = 0xffffffffu;

struct IssuedOperation {
  CollectiveKind kind = CollectiveKind::kAllGather;
  uint32_t unit = kNoUnit;
  std::string what = {};  // "all-gather of unit 'blocks.0'"
  int64_t bytes = 0;
  uint64_t agreement = 0;  // a word that travels with it, compared by the caller
};

// The notices of all ranks about one operation, on their way. Destroying one waits.
class Announcement {
 public:
  Announcement() = default;  // of nothing
  const Stamp& stamp() const { return mine_.stamp; }
  // Every rank's agreement, by group rank. Throws DistBackendError where notices do not
  // arrive, and an error that names both operations where one differs from this rank's.
  // REQUIRES: called once.
  std::vector<uint64_t> wait();

 private:
  friend class IssueLog;
  void check(int64_t peer, const char* bytes, std::vector<uint64_t>& agreements) const;

  std::shared_ptr<IssueLog> log_;
  Notice mine_;
  at::Tensor sent_, received_;  // uint8 [notice], [group size, notice]
  Pending pending_;             // last: waits before the buffers go
};

class IssueLog : public std::enable_shared_from_this<IssueLog> {
 public:
  // The log of the mesh dimension's group. Local.
  static std::shared_ptr<IssueLog> of(const DeviceMesh& mesh, int64_t dim);

  IssueLog(Group group, std::vector<int64_t> global_ranks);

  // Throws after a failure.
  Announcement announce(const IssuedOperation& operation);
  // The same without telling anyone: on devices, where reading notices stalls the host.
  Stamp record(const IssuedOperation& operation);
  // The first one is what later calls throw.
  void note_failure(const std::exception& error);

  int64_t global_rank() const { return global_rank(group_rank_); }
  int64_t global_rank(int64_t group_rank) const {
    return global_ranks_[static_cast<size_t>(group_rank)];
  }

 private:
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const int64_t group_rank_, group_size_;
  const std::vector<int64_t> global_ranks_;  // by group rank
  std::mutex mutex_;
  IssueOrder order_;
  std::string failure_;  // the first one
};

}  // namespace fsdp::internal
