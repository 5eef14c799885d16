// The notices of all ranks about one operation, on their way, with their payloads.
//
//   Announcement announced = log->announce(operation, rows);   // an IssueLog
//   ...
//   announced.wait();          // throws, naming both operations, unless all announced alike
//   announced.payloads()[2];   // what rank 2 sent to this one
//
// A notice goes to every rank of the group and meets the others' whatever they announce.
// How it travels, and the payload in its message, is a NoticeExchange's business:
//
//   messages    Gloo: a message to every rank, in room for the largest payload
//   peer memory on one host: read where the sender has them (device_mesh/peer_memory)
//   gathered    other backends of c10d: an all-gather of the notices, without payloads
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

class NoticeExchange {
 public:
  virtual ~NoticeExchange() = default;
  NoticeExchange(const NoticeExchange&) = delete;
  NoticeExchange& operator=(const NoticeExchange&) = delete;

  // What has to be waited for before anything is read.
  std::vector<Pending>& messages() { return messages_; }
  // REQUIRES: waited for. kNoticeBytes of another rank of the group.
  virtual const char* notice(int64_t rank) const = 0;
  // REQUIRES: waited for, and sent with payloads. What that rank, or this one, sent to
  // this one: uint8 [bytes], keeping its memory. Undefined where it sent none.
  virtual at::Tensor payload(int64_t rank) const = 0;
  // Memory that is held for payloads.
  virtual int64_t staging_bytes() const = 0;
  // Keeps what messages in flight read and write.
  virtual std::shared_ptr<const void> memory() const = 0;

 protected:
  NoticeExchange() = default;
  std::vector<Pending> messages_;
};

// Sends `notice` to every rank of the group, which has others, with `payloads`:
// undefined, uint8 [1, bytes], the same to every rank, or [group size, bytes], row r to
// rank r, each row contiguous and not written as long as the exchange lives. Returns at
// once. Collective over `group`.
std::unique_ptr<NoticeExchange> exchange_notices(const Group& group, const Notice& notice,
                                                 const at::Tensor& payloads);

// Bytes of payload over Gloo with the notice from one rank to another; where ranks share
// memory there is no limit, and over other backends there is none at all. Memory is kept
// ready for as many from every rank, of which only what arrives is ever touched.
int64_t payload_room(int64_t group_size);

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
