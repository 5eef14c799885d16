#include "fake_device/private_use/kernels.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
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

constexpr auto kDeviceKey = c10::DispatchKey::PrivateUse1;

// Composite operators that are one launch on CUDA.
bool is_fused(const c10::OperatorName& name) {
  return name.name.starts_with("aten::_foreach_") || name.name == "aten::_chunk_cat" ||
         (name.name == "aten::split_with_sizes_copy" && name.overload_name == "out");
}

bool is_one_launch(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (!op.hasSchema() || !name.name.starts_with("aten::") || name.name == "aten::set_")
    return false;
  if (op.hasKernelForDispatchKey(kDeviceKey)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || is_fused(name);
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

void register_boxed_kernels(const c10::KernelFunction& kernel, const std::string& by,
                            const std::function<bool(const c10::OperatorHandle&)>& takes) {
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !is_one_launch(*op) || !takes(*op)) continue;
    registered.push_back(
        dispatcher.registerImpl(name, kDeviceKey, kernel, std::nullopt, nullptr, by));
  }
  registered.push_back(dispatcher.registerFallback(kDeviceKey, kernel, by));
}

c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (!value.isList() || value.toListRef().empty()) return value;
  c10::impl::GenericList list(value.toList().elementType());
  for (const c10::IValue& element : value.toListRef())
    list.push_back(with_tensors(element, replace));
  return list;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

const c10::IValue& returned_argument(const c10::FunctionSchema& schema,
                                     const std::vector<c10::IValue>& given, size_t result) {
  const auto* const alias = schema.returns()[result].alias_info();
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* const of_argument = schema.arguments()[i].alias_info();
    if (of_argument != nullptr && *of_argument == *alias) return given[i];
  }
  TORCH_INTERNAL_ASSERT(false, schema.name(), " returns an argument that it does not have");
}

}  // namespace fsdp::internal
