// The notices of all ranks about one operation, on their way, and what rides with them.
//
//   Announcement announced = log->announce(operation, rows);   // an IssueLog
//   ...
//   announced.wait();        // throws, naming both operations, unless all announced alike
//   announced.riders()[2];   // what rank 2 sent to this one
//
// A notice is a message to every rank of the group, received in room for the largest, so
// it meets the others' whatever they announce. A message costs more than its bytes as
// long as these are few, so the data of small operations travels in it.
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/notice.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class AwaitedOperation;
class IssueLog;

// Bytes that can ride with the notice from one rank to another: memory is kept ready for
// as many from every rank, of which only what arrives is ever touched.
int64_t rider_room(int64_t group_size);

// Destroying one that was not waited for waits, and swallows errors.
class Announcement {
 public:
  // Sends `notice` with `riders` (IssueLog::announce). group: null when nobody is told.
  // `awaited` is told which rank it waits for; may be null.
  Announcement(std::shared_ptr<IssueLog> log, Notice notice, const Group& group,
               const at::Tensor& riders, std::shared_ptr<AwaitedOperation> awaited);
  Announcement(Announcement&&) noexcept;
  Announcement& operator=(Announcement&&) = delete;
  ~Announcement();

  const Stamp& stamp() const { return mine_.stamp; }
  const std::shared_ptr<AwaitedOperation>& awaited() const { return awaited_; }
  // Every rank's words, by group rank. Throws DistBackendError where notices do not
  // arrive, an error that names both operations where one differs from this rank's, and
  // one that names all of them where ranks wait for one another (watched_rank.h).
  // REQUIRES: called once.
  std::vector<NoticeWords> wait();
  // REQUIRES: it was announced with riders, and waited for. What each rank sent to this
  // one, itself included, by group rank: uint8 [bytes], keeping their memory.
  std::vector<at::Tensor> riders() const;

 private:
  void gather_notices();
  void post(const at::Tensor& riders);
  void wait_for_messages(const IssueLog& log);
  Notice read(int64_t peer) const;

  std::shared_ptr<IssueLog> log_;  // null: waited for
  Notice mine_;
  Group group_;          // null: nobody else to tell
  int64_t rank_ = 0;     // in the group
  at::Tensor outgoing_;  // uint8 [1 or group size, notice and rider]
  at::Tensor incoming_;  // uint8 [group size, notice and room], by sender
  std::vector<Pending> messages_;
  std::shared_ptr<AwaitedOperation> awaited_;
};

}  // namespace fsdp::internal
