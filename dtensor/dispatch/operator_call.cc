#include "dtensor/dispatch/operator_call.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/jit_type.h>

#include <sstream>
#include <utility>

namespace fsdp::internal {
namespace {

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  } else if (value.isList()) {  // Tensor?[]
    for (const c10::IValue& element : value.toListRef()) append_tensors(element, tensors);
  }
}

bool is_number(const c10::Type& type) {
  if (const auto* const optional = type.castRaw<c10::OptionalType>())
    return is_number(*optional->getElementType());
  if (const auto* const list = type.castRaw<c10::ListType>())
    return is_number(*list->getElementType());
  return type.kind() == c10::TypeKind::NumberType || type.kind() == c10::TypeKind::FloatType;
}

bool has_argument(const c10::FunctionSchema& schema, const char* name) {
  return schema.argumentIndexWithName(name).has_value();
}

}  // namespace

OperatorTraits::OperatorTraits(const c10::OperatorHandle& op)
    : draws_random_numbers(op.hasTag(at::Tag::nondeterministic_seeded)),
      indexes_self(has_argument(op.schema(), "self") &&
                   (has_argument(op.schema(), "index") || has_argument(op.schema(), "indices"))) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (writes(schema.arguments()[i])) written.push_back(i);
    if (is_number(*schema.arguments()[i].type())) numbers.push_back(i);
  }
  for (const auto& result : schema.returns()) {
    returned_argument.emplace_back();
    if (!writes(result)) continue;
    for (size_t i : written) {
      if (*schema.arguments()[i].alias_info() == *result.alias_info()) returned_argument.back() = i;
    }
  }
}

OperatorCall::OperatorCall(const c10::OperatorHandle& op, const OperatorTraits& traits,
                           c10::DispatchKeySet keys, torch::jit::Stack* stack)
    : op_(op),
      traits_(traits),
      keys_(keys),
      stack_(stack),
      argument_count_(op.schema().arguments().size()),
      base_(stack->size() - argument_count_) {}

std::string OperatorCall::name() const {
  const auto& name = op_.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

torch::jit::Stack OperatorCall::arguments() const {
  return torch::jit::Stack(stack_->begin() + static_cast<std::ptrdiff_t>(base_), stack_->end());
}

c10::IValue* OperatorCall::find_argument(const char* name) {
  const auto index = op_.schema().argumentIndexWithName(name);
  return index.has_value() ? &argument(static_cast<size_t>(*index)) : nullptr;
}

void OperatorCall::run_in_place() {
  op_.callBoxed(stack_);
  argument_count_ = 0;
}

std::vector<c10::IValue> OperatorCall::run() {
  op_.callBoxed(stack_);
  std::vector<c10::IValue> results(
      std::make_move_iterator(stack_->begin() + static_cast<std::ptrdiff_t>(base_)),
      std::make_move_iterator(stack_->end()));
  stack_->resize(base_);
  argument_count_ = 0;
  return results;
}

void OperatorCall::decompose() {
  op_.redispatchBoxed(keys_below(kDTensorKey, keys_), stack_);
  argument_count_ = 0;
}

void OperatorCall::finish(std::vector<c10::IValue> results) {
  stack_->resize(base_);
  for (auto& result : results) stack_->push_back(std::move(result));
}

void OperatorCall::finish(c10::IValue result) {
  stack_->resize(base_);
  stack_->push_back(std::move(result));
}

std::vector<at::Tensor> OperatorCall::tensors() const {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < argument_count_; ++i) append_tensors(argument(i), tensors);
  return tensors;
}

std::string OperatorCall::description() const {
  std::ostringstream out;
  out << name() << " on (";
  const char* separator = "";
  for (const at::Tensor& tensor : tensors()) {
    out << separator << describe(tensor);
    separator = "; ";
  }
  out << ")";
  return out.str();
}

std::string describe(const at::Tensor& tensor) {
  if (is_dtensor(tensor)) return "DTensor of " + to_string(spec_of(tensor));
  std::ostringstream out;
  out << "plain tensor of shape " << tensor.sizes();
  return out.str();
}

}  // namespace fsdp::internal
