#include "device_mesh/peer_memory/shared_layout.h"

#include <algorithm>
#include <bit>

namespace fsdp::internal {

uint64_t BlockPlaces::rounded(uint64_t bytes) {
  constexpr uint64_t kLeast = 64, kStepsPerDouble = 4;
  const auto step = std::max(kLeast, std::bit_floor(std::max(bytes, kLeast)) / kStepsPerDouble);
  return std::max(kLeast, (bytes + step - 1) / step * step);
}

BlockRef BlockPlaces::take(uint64_t bytes) {
  const auto size = rounded(bytes);
  if (const auto known = free_.find(size); known != free_.end() && !known->second.empty()) {
    const auto place = known->second.back();
    known->second.pop_back();
    return place;
  }
  for (auto rest = rests_.rbegin(); rest != rests_.rend(); ++rest) {
    if (rest->end - rest->begin < size) continue;
    const BlockRef place(rest->segment, rest->begin);
    rest->begin += size;
    return place;
  }
  return {};
}

void BlockPlaces::give_back(BlockRef place, uint64_t bytes) {
  free_[rounded(bytes)].push_back(place);
}

void BlockPlaces::add_segment(uint32_t segment, uint64_t begin, uint64_t end) {
  rests_.push_back({segment, begin, end});
}

}  // namespace fsdp::internal
