#include "checkpoint/internal/placed_tensors.h"

#include "checkpoint/internal/plain_text.h"
#include "dtensor/internal/shard_layout.h"

#include <exception>
#include <map>
#include <stdexcept>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// The elements from a tensor's first to behind its last. Throws for impossible sizes.
int64_t extent_of(const PickledTensor& tensor) {
  int64_t numel = 1, extent = 1;
  bool is_impossible = false;
  for (const int64_t size : tensor.shape)
    is_impossible |= __builtin_mul_overflow(numel, size, &numel);
  if (numel == 0 && !is_impossible) return 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    int64_t way = 0;
    is_impossible |= __builtin_mul_overflow(tensor.shape[dim] - 1, tensor.strides[dim], &way);
    is_impossible |= __builtin_add_overflow(extent, way, &extent);
  }
  if (is_impossible) throw std::runtime_error("has an impossible shape");
  return extent;
}

bool is_contiguous(const PickledTensor& tensor) {
  const auto dense = contiguous_strides(tensor.shape);
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != dense[dim]) return false;
  }
  return true;
}

ArchivedTensor placed(PickledTensor tensor, const StoragePlace& storage) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t extent = extent_of(tensor);
  int64_t end = 0;
  const bool is_inside = !__builtin_add_overflow(tensor.offset, extent, &end) &&
                         !__builtin_mul_overflow(end, item_bytes, &end) && end <= storage.bytes;
  if (!is_inside) throw std::runtime_error("lies outside of its storage");
  ArchivedTensor archived{.name = std::move(tensor.name), .dtype = tensor.dtype};
  archived.begin = storage.begin + tensor.offset * item_bytes;
  archived.conj = tensor.conj, archived.neg = tensor.neg;
  if (extent > 0 && !is_contiguous(tensor)) archived.strides = std::move(tensor.strides);
  archived.shape = std::move(tensor.shape);
  return archived;
}

}  // namespace

ArchivedTensors place_tensors(PickledTensors found,
                              const std::function<StoragePlace(const std::string& key)>& find) {
  ArchivedTensors archived{.unread = std::move(found.unread)};
  std::map<std::string, StoragePlace> places;
  for (PickledTensor& tensor : found.tensors) {
    const std::string name = tensor.name;
    try {
      auto place = places.find(tensor.storage);
      if (place == places.end()) {
        place = places.emplace(tensor.storage, find(tensor.storage)).first;
      }
      archived.tensors.push_back(placed(std::move(tensor), place->second));
    } catch (const std::exception& error) {
      archived.unread.push_back({name, "a tensor that " + plain_text_of(error), true});
    }
  }
  return archived;
}

}  // namespace fsdp::internal::checkpoint
