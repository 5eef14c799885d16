#include "fake_device/private_use/kernels.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <utility>

namespace fsdp::internal {
namespace {

at::Tensor alias_of(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                    int64_t offset) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(offset);
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return alias;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return alias_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return alias_of(self, size, stride, self.storage_offset());
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const auto shape = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride, "view: ", self.sizes(), " of strides ", self.strides(), " as ", size,
              ": use reshape()");
  return alias_of(self, shape, *stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  const auto d = static_cast<size_t>(dim < 0 ? dim + self.dim() : dim);
  sizes.push_back(size);
  strides.push_back(strides[d]);
  sizes[d] = (sizes[d] - size) / step + 1;
  strides[d] *= step;
  return alias_of(self, sizes, strides, self.storage_offset());
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

}  // namespace

void register_view_kernels(torch::Library& library) {
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view", &view);
  library.impl("unfold", &unfold);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
}

}  // namespace fsdp::internal
