#include "device_mesh/collectives/notices/gathered_notices.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <cstring>
#include <utility>

namespace fsdp::internal {

GatheredNotices::GatheredNotices(const Group& group, const Notice& notice)
    : own_(scratch_memory({1, kNoticeBytes}, at::kByte, c10::kCPU)),
      of_all_(scratch_memory({group_size(group), kNoticeBytes}, at::kByte, c10::kCPU)) {
  const auto bytes = write_notice(notice);
  std::memcpy(own_.mutable_data_ptr(), bytes.data(), bytes.size());
  messages_.push_back(all_gather(group, of_all_, own_));
}

const char* GatheredNotices::notice(int64_t rank) const {
  return static_cast<const char*>(of_all_.const_data_ptr()) + rank * of_all_.size(1);
}

std::shared_ptr<const void> GatheredNotices::memory() const {
  return std::make_shared<std::pair<at::Tensor, at::Tensor>>(own_, of_all_);
}

}  // namespace fsdp::internal
