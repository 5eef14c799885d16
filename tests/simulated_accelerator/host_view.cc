#include "tests/simulated_accelerator/host_view.h"

#include "tests/simulated_accelerator/machine.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace fsdp::testing::simulated {
namespace {

Access access_of(const at::Tensor& tensor, bool is_written) {
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {first, first, is_written};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.element_size()), is_written};
}

at::Tensor with_flag_of(const at::Tensor& original, at::Tensor copy) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

PlainKernels::PlainKernels()
    : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
            c10::default_excluded_set | c10::autograd_dispatch_keyset |
                c10::autocast_dispatch_keyset) {}

at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto* const data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

Access reads(const at::Tensor& tensor) { return access_of(tensor, false); }
Access writes(const at::Tensor& tensor) { return access_of(tensor, true); }

at::Tensor copy_of_host_value(const at::Tensor& value) {
  const PlainKernels plain;
  return with_flag_of(value, value.clone());
}

at::Tensor filled_like(const at::Tensor& tensor, int64_t number) {
  const PlainKernels plain;
  auto filled = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  return with_flag_of(tensor, filled.fill_(number));
}

c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  }
  if (!value.isList() || value.toListRef().empty()) return value;
  c10::impl::GenericList list(value.toList().elementType());
  for (const c10::IValue& element : value.toListRef()) {
    list.push_back(with_tensors(element, replace));
  }
  return list;
}

}  // namespace fsdp::testing::simulated
