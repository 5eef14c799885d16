// Notices as messages through Gloo: one to every rank, received in room for the largest,
// so it meets the others' whatever they announce. A message costs more than its bytes as
// long as these are few, so the data of small operations travels in it.
#pragma once

#include "device_mesh/collectives/notices/notice_exchange.h"

namespace fsdp::internal {

// Bytes that can ride with the notice from one rank to another: memory is kept ready for
// as many from every rank, of which only what arrives is ever touched.
int64_t rider_room(int64_t group_size);

class MessageExchange final : public NoticeExchange {
 public:
  MessageExchange(const Group& group, const Notice& notice, const at::Tensor& riders);

  const char* notice(int64_t rank) const override;
  at::Tensor rider(int64_t rank) const override;
  int64_t staging_bytes() const override;
  std::shared_ptr<const void> memory() const override;

 private:
  int64_t rank_, size_;
  at::Tensor outgoing_;  // uint8 [1 or group size, notice and rider]
  at::Tensor incoming_;  // uint8 [group size, notice and room], by sender
};

}  // namespace fsdp::internal
