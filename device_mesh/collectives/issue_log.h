// What one rank issues on one process group, in order, and why nothing more is issued
// there. Whether the other ranks issue the same is found out by the Announcement that it
// gives for each operation.
//
//   auto log = IssueLog::of(group, mesh.device_type());
//   Announcement announced = log->announce({.kind = CollectiveKind::kAllGather,
//                                           .what = "all-gather of unit 'l0'", .bytes = 352});
//   ...
//   announced.wait();   // throws, naming both operations, unless all ranks announced the same
//
// Announcements meet whatever the ranks issue (announcement.h). After a failure the ranks
// no longer agree on what was sent, and nothing more is announced. One log per process
// group, as long as that lives; found by the group, since ranks may be threads.
// Thread-safe, but for announce(), which is called in one order on all ranks. Messages
// give ranks of the whole job.
#pragma once

#include "device_mesh/collectives/announcement.h"
#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/notice.h"
#include "device_mesh/collectives/operation_record.h"
#include "device_mesh/collectives/watched_rank.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::internal {

struct IssuedOperation {
  CollectiveKind kind = CollectiveKind::kAllGather;
  uint32_t unit = kNoUnit;
  std::string what = {};  // "all-gather of unit 'blocks.0'"
  int64_t bytes = 0;
  NoticeWords words = {};  // travel with it, compared by the caller
};

class IssueLog : public std::enable_shared_from_this<IssueLog> {
 public:
  // The log of `group` for tensors of that device type. Local.
  static std::shared_ptr<IssueLog> of(const Group& group, c10::DeviceType device_type);
  // From now on nothing is announced on `group`, since destroy_process_group() ended it.
  static void end(const Group& group);

  IssueLog(const Group& group, bool on_device);
  // The log of `side`, another group of the same ranks. What is issued on the one and on
  // the other may come in another order on each rank; a failure of one ends both. Local.
  std::shared_ptr<IssueLog> beside(const Group& side) const;

  // Whether other ranks are told of what is issued: not on devices, since reading notices
  // would stall the host, nor in a fake world or a group of one, where nobody is. The
  // same answer on every rank. Local.
  bool tells() const { return tells_; }
  // Throws after a failure. payloads: bytes that travel with the notices, as
  // exchange_notices() takes them; how many follows from operation.bytes, so that all
  // ranks decide alike whether they travel so. REQUIRES: with payloads: tells(), and they
  // fit (payload_room).
  Announcement announce(const IssuedOperation& operation, const at::Tensor& payloads = {});
  // Announces, waits until all ranks agree, and runs `collective`, which gives a Pending,
  // to its end. Gives the ranks' words.
  template <class Collective>
  std::vector<NoticeWords> run(const IssuedOperation& operation, const Collective& collective) {
    auto words = announce(operation).wait();
    watch([&] { collective().wait(operation.what); });
    return words;
  }
  // Waits for one message of another rank. awaited: the operation of this thread's
  // WaitScope; null: nobody watches. Throws as Pending::wait() does, and an error that
  // names all of them where ranks wait for one another (watched_rank.h).
  void await_message(Pending& message, const std::shared_ptr<AwaitedOperation>& awaited,
                     const std::string& what) const;
  // Waits for what a rank does by itself, in `message`, which has that rank as its peer:
  // nothing is announced, and ranks may wait here in any order. Throws as announced
  // collectives do, and where ranks wait for one another.
  void await_apart(Pending message, const std::string& what);
  // Runs `wait`; what it throws is noted as a failure. The first one of the backend says
  // also what the other ranks failed in, when they do so within a second, and the first
  // operation that not all of them issued.
  template <class Wait>
  auto watch(const Wait& wait) {
    try {
      return wait();
    } catch (c10::DistBackendError& error) {
      tell_peers(error);
      add_word_of_others(error);
      note_failure(error);
      throw;
    } catch (const std::exception& error) {
      note_failure(error);
      throw;
    }
  }
  // The first one is what later calls throw.
  void note_failure(const std::exception& error);
  // Throws, naming `what`, after a failure.
  void check_usable(const std::string& what);

  int64_t global_rank() const { return global_rank_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }  // of the job, by group rank
  // Of the last operation that this rank issued here; zeros before the first. Local.
  Stamp last_stamp() const;
  // The last ones that this rank issued here and beside, oldest first. Local.
  std::vector<RecordedOperation> recent_operations() const;

 private:
  struct WeakGroup;  // a weak pointer needs the whole type, which is heavy
  // What the logs of one mesh dimension share.
  struct Shared {
    std::mutex mutex;
    std::string failure;  // why nothing is announced any more: the first reason; empty: it is
    c10::intrusive_ptr<c10d::Store> store;  // where ranks leave word of it
    OperationRecord record;
    std::vector<std::shared_ptr<const WeakGroup>> lanes;  // of the logs
    const std::shared_ptr<Issuers> issuers = std::make_shared<Issuers>();

    void refuse_from_now_on(const std::string& reason);  // unless it does already
  };
  IssueLog(const Group& group, bool tells, std::shared_ptr<Shared> shared);
  static std::shared_ptr<IssueLog> log_of(const Group& group, bool on_device);
  Stamp record(const IssuedOperation& operation);
  std::shared_ptr<WatchedLane> watched(const Group& group) const;
  void tell_peers(const c10::Error& error) const;
  void add_word_of_others(c10::Error& error);

  const std::shared_ptr<const WeakGroup> group_;
  const int64_t group_size_;
  const std::vector<int64_t> ranks_;
  const int64_t global_rank_;
  const bool tells_;
  const std::shared_ptr<Shared> shared_;
  const uint32_t lane_;                         // among those, the same on every rank
  const std::shared_ptr<WatchedLane> watched_;  // null: nobody looks whether waits can end
  mutable std::mutex order_mutex_;
  IssueOrder order_;
  Stamp last_stamp_;
};

}  // namespace fsdp::internal
