#include "device_mesh/collectives/notices/notice_exchange.h"

#include "device_mesh/collectives/notices/gathered_notices.h"
#include "device_mesh/collectives/notices/message_exchange.h"
#include "device_mesh/collectives/notices/peer_exchange.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace fsdp::internal {

std::unique_ptr<NoticeExchange> exchange_notices(const Group& group, const Notice& notice,
                                                 const at::Tensor& riders) {
  if (auto channel = PeerChannel::of(group))
    return std::make_unique<PeerExchange>(group, std::move(channel), notice, riders);
  if (has_gloo(group)) return std::make_unique<MessageExchange>(group, notice, riders);
  return std::make_unique<GatheredNotices>(group, notice);
}

bool carries_riders(const Group& group, int64_t bytes) {
  return reads_riders_in_place(group) ||
         (has_gloo(group) && bytes <= rider_room(group_size(group)));
}

bool reads_riders_in_place(const Group& group) { return PeerChannel::of(group) != nullptr; }

at::Tensor rider_memory(const Group& group, at::IntArrayRef sizes) {
  const auto channel = PeerChannel::of(group);
  if (!channel) return scratch_memory(sizes, at::kByte, c10::kCPU);
  auto memory = channel->memory().memory(c10::multiply_integers(sizes));
  memory.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return memory;
}

}  // namespace fsdp::internal
