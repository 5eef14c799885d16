#include "fully_shard/params/unsharded_memory.h"

#include "device_mesh/collectives/scratch_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {

UnshardedMemory::~UnshardedMemory() {
  if (is_shown_) count(-1);
}

void UnshardedMemory::count(int64_t sign) const {
  accounts_.add(is_in_place() ? &Counters::in_place_bytes : &Counters::unsharded_bytes,
                sign * bytes_.numel());
}

void UnshardedMemory::fill_copy(const RowsOfRanks& rows, const PackedLayout& layout,
                                c10::Device device) {
  discard();
  bytes_ = scratch_memory({layout.bytes(Arrangement::kCommon)}, at::kByte, device);
  unpack_rows(rows, {bytes_, layout});
}

void UnshardedMemory::fill_in_place(std::unique_ptr<ReadInPlace> read) {
  in_place_ = std::move(read);
  bytes_ = in_place_->bytes();
}

void UnshardedMemory::discard() {
  in_place_.reset();
  bytes_.reset();
}

void UnshardedMemory::show(const PackedLayout& layout, const std::vector<FSDPParam>& params) {
  is_shown_ = true;
  count(1);
  for (size_t i = 0; i < params.size(); ++i) {
    auto* const storage = params[i].storage();
    if (storage != nullptr) storage->fill(data(layout, static_cast<int64_t>(i)));
  }
}

void UnshardedMemory::leave_shards(const PackedLayout& layout,
                                   const std::vector<FSDPParam>& params) {
  auto copy = scratch_memory({bytes_.numel()}, at::kByte, bytes_.device());
  std::memcpy(copy.mutable_data_ptr(), bytes_.const_data_ptr(), bytes_.nbytes());
  count(-1);
  in_place_.reset();
  bytes_ = std::move(copy);
  show(layout, params);
}

void UnshardedMemory::empty(const std::vector<FSDPParam>& params) {
  for (const auto& param : params) {
    if (param.storage() != nullptr) param.storage()->empty();
  }
  count(-1);
  is_shown_ = false;
  discard();
}

void UnshardedMemory::poison() {
  if (is_in_place()) return;
  if (bytes_.is_cpu()) std::fill_n(static_cast<char*>(bytes_.data_ptr()), bytes_.numel(), '\xff');
  poisoned_ = bytes_;
}

char* UnshardedMemory::data(const PackedLayout& layout, int64_t index) const {
  return static_cast<char*>(bytes_.data_ptr()) + layout.chunk(index).whole_offset;
}

at::Tensor UnshardedMemory::elements(const PackedLayout& layout, int64_t index,
                                     const ParamMeta& meta) const {
  const auto& chunk = layout.chunk(index);
  return bytes_.narrow(0, chunk.whole_offset, chunk.extent.nbytes()).view(meta.member_dtype());
}

}  // namespace fsdp::internal
