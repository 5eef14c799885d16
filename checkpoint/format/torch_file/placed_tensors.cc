#include "checkpoint/format/torch_file/placed_tensors.h"

#include "checkpoint/files/plain_text.h"
#include "dtensor/layout/shard_layout.h"

#include <algorithm>
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

bool lies_in_storage(const PickledTensor& tensor, const StoragePlace& storage) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  int64_t end = 0;
  return !__builtin_add_overflow(tensor.offset, extent_of(tensor), &end) &&
         !__builtin_mul_overflow(end, item_bytes, &end) && end <= storage.bytes;
}

// As imag() of a complex tensor lies, in elements of its real dtype.
bool lies_as_imaginary_part(const PickledTensor& tensor) {
  const auto is_even = [](int64_t stride) { return stride % 2 == 0; };
  return tensor.offset % 2 == 1 &&
         std::all_of(tensor.strides.begin(), tensor.strides.end(), is_even);
}

// LibTorch writes the dtype of a storage once, that of the first tensor in it. So the
// imaginary part of a conjugate, a real tensor with the negative bit, is described as
// complex behind the conjugate, and then lies outside of the storage. What else has that
// bit and a complex dtype may be either.
void resolve_dtype(PickledTensor& tensor, const StoragePlace& storage) {
  if (!tensor.neg || !c10::isComplexType(tensor.dtype)) return;
  if (!lies_as_imaginary_part(tensor) || lies_in_storage(tensor, storage)) {
    throw std::runtime_error("has the bit of a negated real tensor and is described as complex");
  }
  tensor.dtype = c10::toRealValueType(tensor.dtype);
}

ArchivedTensor placed(PickledTensor tensor, const StoragePlace& storage) {
  resolve_dtype(tensor, storage);
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t extent = extent_of(tensor);
  if (!lies_in_storage(tensor, storage)) {
    const bool may_be_real = c10::isComplexType(tensor.dtype);
    throw std::runtime_error(std::string("lies outside of its storage") +
                             (may_be_real ? ", as LibTorch writes a real view behind its complex "
                                            "tensor; save a clone() of it"
                                          : ""));
  }
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
