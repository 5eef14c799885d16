#include "fake_device/fake_device.h"
#include "fake_device/kernels.h"
#include "fake_device/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <utility>

namespace fsdp::internal {
namespace {

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, fake_allocator(), kDeviceKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, fake_allocator(), kDeviceKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const auto elements = c10::multiply_integers(size) + self.storage_offset();
  const auto bytes = static_cast<size_t>(elements) * self.element_size();
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(fake_allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
  }
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

// There is nothing to copy. What the host gets is ones: a value that is true, finite and
// no number to divide by that ends a program.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  if (self.device().type() == kFakeDevice && target.is_cpu()) target.fill_(1);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, /*non_blocking=*/false);
}

at::Scalar read_number(const at::Tensor& self) {
  if (self.scalar_type() == at::kBool) return true;
  if (at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return int64_t{1};
  return 1.0;
}

}  // namespace

void register_memory_kernels(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_number);
}

}  // namespace fsdp::internal
