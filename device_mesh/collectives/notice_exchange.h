// How the notices of one operation, and the bytes that ride with them, travel to the
// other ranks of a group: the announcement (announcement.h) says what they mean.
//
//   messages    Gloo: a message to every rank, in room for the largest rider
//   peer memory on one host: read where the sender has them (device_mesh/peer_memory)
//   gathered    other backends of c10d: an all-gather of the notices, without riders
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
  // REQUIRES: waited for, and sent with riders. What that rank, or this one, sent to this
  // one: uint8 [bytes], keeping its memory. Undefined where it sent none.
  virtual at::Tensor rider(int64_t rank) const = 0;
  // Memory that is held for riders.
  virtual int64_t staging_bytes() const = 0;
  // Keeps what messages in flight read and write.
  virtual std::shared_ptr<const void> memory() const = 0;

 protected:
  NoticeExchange() = default;
  std::vector<Pending> messages_;
};

// Sends `notice` to every rank of the group, which has others, with `riders`: undefined,
// uint8 [1, bytes], the same to every rank, or [group size, bytes], row r to rank r, each
// row contiguous and not written as long as the exchange lives. Returns at once.
// Collective over `group`.
std::unique_ptr<NoticeExchange> exchange_notices(const Group& group, const Notice& notice,
                                                 const at::Tensor& riders);

// Bytes that can ride over Gloo with the notice from one rank to another: memory is kept
// ready for as many from every rank, of which only what arrives is ever touched.
int64_t rider_room(int64_t group_size);
// Whether rows of `bytes` can ride, which at least small ones can over Gloo; and whether
// any can, since they are read where they lie. The same answer on every rank. Local.
bool carries_riders(const Group& group, int64_t bytes);
bool reads_riders_in_place(const Group& group);
// Where riders are read in place, memory that is sent without a copy; else any: uint8,
// not initialised.
at::Tensor rider_memory(const Group& group, at::IntArrayRef sizes);

}  // namespace fsdp::internal
