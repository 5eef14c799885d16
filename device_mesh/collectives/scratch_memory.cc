#include "device_mesh/collectives/scratch_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/mobile/CPUCachingAllocator.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace fsdp::internal {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kLargestKept = 0;
#else
constexpr size_t kLargestKept = 64 << 10;  // bytes; copying more takes longer than malloc
#endif

c10::CPUCachingAllocator& kept_blocks() {
  static auto& blocks = *new c10::CPUCachingAllocator();  // leaked: tensors may die after it
  return blocks;
}

c10::Storage kept_block(size_t bytes) {
  void* const block = kept_blocks().allocate(bytes);
  const auto give_back = [](void* given) { kept_blocks().free(given); };
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(block, block, give_back, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
      /*resizable=*/true));
}

}  // namespace

at::Tensor scratch_memory(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (!device.is_cpu() || bytes == 0 || bytes > kLargestKept)
    return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
  auto impl = c10::make_intrusive<c10::TensorImpl>(kept_block(bytes),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

}  // namespace fsdp::internal
