// How the notices of one operation, and the payload in their messages, travel to the
// other ranks of a group: the announcement (announcement.h) says what they mean.
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

}  // namespace fsdp::internal
