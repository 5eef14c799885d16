// Notices by an all-gather of the backend, where it is none whose messages are fast. They
// carry no riders. Ranks that announce different operations meet all the same.
#pragma once

#include "device_mesh/collectives/notices/notice_exchange.h"

namespace fsdp::internal {

class GatheredNotices final : public NoticeExchange {
 public:
  GatheredNotices(const Group& group, const Notice& notice);

  const char* notice(int64_t rank) const override;
  at::Tensor rider(int64_t) const override { return {}; }
  int64_t staging_bytes() const override { return 0; }
  std::shared_ptr<const void> memory() const override;

 private:
  at::Tensor own_, of_all_;
};

}  // namespace fsdp::internal
