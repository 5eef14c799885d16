// The notices of all ranks about one operation, on their way, with their payloads.
//
//   Announcement announced = log->announce(operation, rows);   // an IssueLog
//   ...
//   announced.wait();          // throws, naming both operations, unless all announced alike
//   announced.payloads()[2];   // what rank 2 sent to this one
//
// A notice goes to every rank of the group and meets the others' whatever they announce;
// how it travels, and with what payload, is in notice_exchange.h.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/notice.h"
#include "device_mesh/collectives/notice_exchange.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class AwaitedOperation;
class IssueLog;

// Destroying one that was not waited for waits, and swallows errors.
class Announcement {
 public:
  // Sends `notice` with `payloads` (IssueLog::announce). group: null when nobody is told.
  // `awaited` is told which rank it waits for; may be null.
  Announcement(std::shared_ptr<IssueLog> log, Notice notice, const Group& group,
               const at::Tensor& payloads, std::shared_ptr<AwaitedOperation> awaited);
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
  // REQUIRES: it was announced with payloads, and waited for. What each rank sent to this
  // one, itself included, by group rank: uint8 [bytes], keeping their memory.
  std::vector<at::Tensor> payloads() const;
  // Memory that is held for payloads. Local.
  int64_t staging_bytes() const { return exchange_ ? exchange_->staging_bytes() : 0; }

 private:
  Notice read(int64_t peer) const;

  std::shared_ptr<IssueLog> log_;  // null: waited for
  Notice mine_;
  Group group_;                               // null: nobody else to tell
  int64_t rank_ = 0;                          // in the group
  std::unique_ptr<NoticeExchange> exchange_;  // null where there is nobody to tell
  std::shared_ptr<AwaitedOperation> awaited_;
};

}  // namespace fsdp::internal
