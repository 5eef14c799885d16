#include "device_mesh/peer_memory/arena.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr uint64_t kFirstSegment = 1 << 20, kLargestStep = 64 << 20;  // bytes
constexpr uint64_t kHeader = sizeof(BlockHeader);

}  // namespace

// What a tensor of the arena holds.
struct Arena::Owned {
  std::shared_ptr<Arena> arena;
  Block block;

  static void destroy(void* context) {
    auto* const owned = static_cast<Owned*>(context);
    owned->arena->give_back(owned->block);
    delete owned;
  }
};

Arena::Arena(std::function<void(const SegmentName&)> added) : added_(std::move(added)) {}

BlockHeader* Arena::header_of(const Block& block) const {
  return reinterpret_cast<BlockHeader*>(block.data - kHeader);
}

Arena::Block Arena::take(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  sweep();
  auto place = places_.take(kHeader + bytes);
  if (!place) {
    add_segment_for(BlockPlaces::rounded(kHeader + bytes));
    place = places_.take(kHeader + bytes);
  }
  auto* const first = segments_[place.segment()]->data() + place.offset();
  new (first) BlockHeader{};
  return {place, first + kHeader, bytes};
}

void Arena::add_segment_for(uint64_t bytes) {
  const auto step = std::clamp(bytes_, kFirstSegment, kLargestStep);
  const auto size = std::max(step, bytes + SharedSegment::kHeaderBytes);
  try {
    auto segment = SharedSegment::create(size);
    added_(segment->name());
    places_.add_segment(static_cast<uint32_t>(segments_.size()), SharedSegment::kHeaderBytes, size);
    segments_.push_back(std::move(segment));
    bytes_ += size;
  } catch (c10::Error& error) {
    error.add_context(c10::str("this rank shares ", bytes_,
                               " bytes with the others of its host "
                               "and needs ",
                               bytes, " more; FSDP_PEER_MEMORY=off does without"));
    throw;
  }
}

void Arena::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  still_read_.push_back(block);
  sweep();
}

void Arena::sweep() {
  std::erase_if(still_read_, [this](const Block& block) {
    if (header_of(block)->readers.load(std::memory_order_acquire) != 0) return false;
    places_.give_back(block.ref, kHeader + block.bytes);
    return true;
  });
}

// Made by hand, since it is done for every row that is sent.
at::Tensor Arena::memory(int64_t bytes) {
  const auto block = take(static_cast<uint64_t>(bytes));
  auto* const owned = new Owned{shared_from_this(), block};
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
      c10::DataPtr(block.data, owned, &Owned::destroy, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   c10::scalarTypeToTypeMeta(at::kByte));
  impl->set_sizes_contiguous({bytes});
  return at::Tensor(std::move(impl));
}

std::optional<Arena::Lent> Arena::lent_by(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &Owned::destroy) return std::nullopt;
  const auto& owned = *static_cast<const Owned*>(data.get_context());
  const auto offset = static_cast<const char*>(tensor.const_data_ptr()) - owned.block.data;
  return Lent{owned.arena.get(), owned.block.ref, owned.arena->header_of(owned.block),
              static_cast<uint64_t>(offset)};
}

}  // namespace fsdp::internal
