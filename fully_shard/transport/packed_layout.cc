#include "fully_shard/transport/packed_layout.h"

namespace fsdp::internal {

int64_t align_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

PackedLayout::PackedLayout(const std::vector<DimZeroExtent>& extents, int64_t world) {
  chunks_.reserve(extents.size());
  for (const auto& extent : extents) {
    const int64_t capacity = (extent.rows + world - 1) / world * extent.row_bytes;
    chunks_.push_back({row_bytes_, capacity, extent.rows * extent.row_bytes});
    row_bytes_ += align_up(capacity);
  }
}

}  // namespace fsdp::internal
