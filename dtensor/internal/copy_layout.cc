#include "dtensor/internal/copy_layout.h"

#include "dtensor/internal/shard_layout.h"

#include <c10/core/MemoryFormat.h>

namespace fsdp::internal {

std::vector<int64_t> strides_of_copy(const at::Tensor& self, const c10::IValue* memory_format) {
  const bool given = memory_format != nullptr && !memory_format->isNone();
  switch (given ? memory_format->toMemoryFormat() : c10::MemoryFormat::Preserve) {
    case c10::MemoryFormat::Contiguous:
      return contiguous_strides(self.sizes().vec());
    case c10::MemoryFormat::ChannelsLast:
      return c10::get_channels_last_strides_2d(self.sizes());
    case c10::MemoryFormat::ChannelsLast3d:
      return c10::get_channels_last_strides_3d(self.sizes());
    default:
      break;
  }
  if (self.is_non_overlapping_and_dense()) return self.strides().vec();
  return dense_strides(self.sizes().vec(), self.strides().vec());
}

}  // namespace fsdp::internal
