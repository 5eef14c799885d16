// Notices among ranks that share memory. A rider of any size is read where its sender has
// it, without a copy where it lies in rider_memory(); as long as somebody reads it, its
// memory is not used for anything else. Nothing but a receiver waits.
#pragma once

#include "device_mesh/collectives/notices/notice_exchange.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

class PeerExchange final : public NoticeExchange {
 public:
  PeerExchange(const Group& group, std::shared_ptr<PeerChannel> channel, const Notice& notice,
               const at::Tensor& riders);
  ~PeerExchange() override;

  const char* notice(int64_t rank) const override;
  at::Tensor rider(int64_t rank) const override;
  int64_t staging_bytes() const override;
  std::shared_ptr<const void> memory() const override { return nullptr; }

 private:
  void send(const Group& group, const Notice& notice);
  at::Tensor row_for(int64_t rank, const at::Tensor& rows) const;

  std::shared_ptr<PeerChannel> channel_;
  int64_t rank_;
  at::Tensor riders_;                                      // as they were given
  at::Tensor sent_;                                        // where the others read them
  std::vector<c10::intrusive_ptr<PeerReceive>> received_;  // by rank; null for this one
};

}  // namespace fsdp::internal
