#include "fake_device/pointwise_kernel.h"

#include "fake_device/fake_device.h"
#include "fake_device/private_use/values_in_calls.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>

#include <set>
#include <string>
#include <vector>

namespace fsdp::internal {

namespace {

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

}  // namespace

bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  if (returns.size() != 1 || returns.front().type()->kind() != c10::TypeKind::TensorType)
    return false;
  return op.hasTag(at::Tag::pointwise) || lacks_tag(op.schema().name());
}

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

}  // namespace fsdp::internal
