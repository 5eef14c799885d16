#include "fake_device/shape_kernel.h"

#include "fake_device/fake_device.h"
#include "fake_device/flops.h"
#include "fake_device/pointwise_kernel.h"
#include "fake_device/private_use/plain_kernels.h"
#include "fake_device/private_use/values_in_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>

#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using Values = std::vector<c10::IValue>;
const c10::Device kOnDevice(kFakeDevice, 0);

// Numbers wrapped as tensors stay that: types are promoted by it.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(c10::kMeta).requires_grad(false));
}

Values on_meta(const Values& given) {
  Values values;
  values.reserve(given.size());
  for (const auto& value : given) {
    values.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kMeta))
                                      : with_tensors(value, [](const at::Tensor& tensor) {
                                          return on_meta(tensor);
                                        }));
  }
  return values;
}

at::Tensor on_device(const at::Tensor& shape) {
  if (!shape.is_meta()) return shape;
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(kOnDevice));
}

// An out= argument of another shape.
void resize_written(const c10::FunctionSchema& schema, const Values& given, const Values& shapes) {
  for (size_t i = 0; i < given.size(); ++i) {
    if (!is_written(schema.arguments()[i]) || !given[i].isTensor()) continue;
    const auto tensor = given[i].toTensor();
    const auto& shape = shapes[i].toTensor();
    if (tensor.defined() && tensor.sizes() != shape.sizes()) tensor.resize_(shape.sizes());
  }
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  for (const auto key : {Key::Meta, Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd,
                         Key::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

}  // namespace

bool has_shape_kernel(const c10::OperatorHandle& op) {
  return has_meta_kernel(op) || is_pointwise(op);
}

void shape_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!has_meta_kernel(op) && is_pointwise(op)) return pointwise_kernel(op, stack);
  TORCH_CHECK_NOT_IMPLEMENTED(has_meta_kernel(op), "fake device: ", op.operator_name(),
                              " has no meta kernel, and shapes of its results are not known");
  const Values given = torch::jit::pop(*stack, schema.arguments().size());
  count_flops(schema, given);
  const Values shapes = on_meta(given);
  Values results = shapes;
  {
    const PlainKernels plain;
    op.callBoxed(&results);
  }
  resize_written(schema, given, shapes);
  for (size_t i = 0; i < results.size(); ++i) {
    stack->push_back(is_written(schema.returns()[i]) ? returned_argument(schema, given, i)
                                                     : with_tensors(results[i], on_device));
  }
}

}  // namespace fsdp::internal
