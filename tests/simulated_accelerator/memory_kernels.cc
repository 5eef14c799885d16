#include "tests/simulated_accelerator/allocator.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/kernels.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

namespace fsdp::testing::simulated {
namespace {

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(), kDeviceKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kDeviceKeys,
                                           c10::dtype_or_default(dtype));
}

void enlarge(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  const auto kept = storage.nbytes();
  auto data = device_allocator()->allocate(bytes);
  auto* const to = static_cast<char*>(data.get());
  const auto* const from = static_cast<const char*>(storage.data());
  if (kept > 0) {
    Machine::instance().launch(current_queue(storage.device().index()),
                               {"resize_",
                                {{from, from + kept, false}, {to, to + kept, true}},
                                [to, from, kept] { std::memcpy(to, from, kept); }});
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const auto elements = c10::multiply_integers(size) + self.storage_offset();
  const auto bytes = static_cast<size_t>(elements) * self.element_size();
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) enlarge(*storage, bytes);
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream_of(at::Tensor& self, c10::Stream) { record_stream(self.storage().data_ptr()); }

}  // namespace

void register_memory_kernels(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("record_stream", &record_stream_of);
}

}  // namespace fsdp::testing::simulated
