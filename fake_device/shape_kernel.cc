#include "fake_device/shape_kernel.h"

#include "fake_device/fake_device.h"
#include "fake_device/private_use/kernels.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp {
namespace internal {
namespace {

std::atomic<double> flops_so_far = 0;

// Where the first of the two factors is among the arguments.
const std::map<std::string, size_t>& products() {
  static const auto& places = *new std::map<std::string, size_t>{
      {"aten::mm", 0},   {"aten::bmm", 0},    {"aten::mv", 0},
      {"aten::dot", 0},  {"aten::addmm", 1},  {"aten::addmv", 1},
      {"aten::addr", 1}, {"aten::addbmm", 1}, {"aten::baddbmm", 1},
  };
  return places;
}

// Adds what a call of the operator costs. Only products of matrices count: all else is
// bound by memory.
void count_flops_of(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  const auto found = products().find(schema.name());
  if (found == products().end()) return;
  const auto& first = arguments[found->second].toTensor();
  const auto& second = arguments[found->second + 1].toTensor();
  // [.., n, k] by [.., k, m]; of addr [n] by [m]
  const bool is_outer = schema.name() == "aten::addr";
  const auto columns = is_outer ? second.numel() : second.dim() > 1 ? second.size(-1) : 1;
  count_flops(2.0 * static_cast<double>(first.numel()) * static_cast<double>(columns));
}

// Operators that go from element to element and have no meta kernel.

// LibTorch's tag is not on all of them.
bool lacks_tag(const std::string& name) {
  static const std::set<std::string> names = {"aten::binary_cross_entropy_backward",
                                              "aten::floor_divide",
                                              "aten::where",
                                              "aten::hardswish",
                                              "aten::hardswish_backward",
                                              "aten::hardtanh_backward",
                                              "aten::log_sigmoid_backward",
                                              "aten::mse_loss_backward",
                                              "aten::rsub",
                                              "aten::flip",
                                              "aten::roll"};
  return names.contains(name);
}

// What the operands are broadcast and promoted to.
struct Broadcast {
  std::vector<int64_t> shape;
  at::native::ResultTypeState types = {};

  void add(const c10::IValue& value) {
    if (value.isScalar()) types = at::native::update_result_type_state(value.toScalar(), types);
    if (!value.isTensor() || !value.toTensor().defined()) return;
    shape = at::infer_size(shape, value.toTensor().sizes());
    types = at::native::update_result_type_state(value.toTensor(), types);
  }
};

// Whether it goes from element to element, of one result.
bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  if (returns.size() != 1 || returns.front().type()->kind() != c10::TypeKind::TensorType)
    return false;
  return op.hasTag(at::Tag::pointwise) || lacks_tag(op.schema().name());
}

// The result has the shape that the operands are broadcast to, and the dtype that they
// are promoted to, unless it is written where the caller says.
void pointwise_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::pop(*stack, schema.arguments().size());
  Broadcast operands;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!is_written(schema.arguments()[i])) operands.add(given[i]);
  }
  if (is_written(schema.returns().front())) {
    const auto result = returned_argument(schema, given, 0);
    if (result.toTensor().numel() == 0) result.toTensor().resize_(operands.shape);
    stack->push_back(result);
    return;
  }
  const bool is_question = schema.name() == "aten::isnan";
  const auto dtype = is_question ? at::kBool : at::native::result_type(operands.types);
  const auto options = c10::TensorOptions(c10::Device(kFakeDevice, 0));
  stack->push_back(at::empty(operands.shape, options.dtype(dtype)));
}

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
  count_flops_of(schema, given);
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

void count_flops(double flops) { flops_so_far += flops; }

}  // namespace internal

double fake_flops() { return internal::flops_so_far; }

}  // namespace fsdp
