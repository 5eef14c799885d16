#include "dtensor/dispatch/operands.h"

#include <ATen/core/jit_type.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

const c10::Type& without_optional(const c10::Type& type) {
  return type.kind() == c10::TypeKind::OptionalType ? *type.containedType(0) : type;
}

at::Tensor tensor_or_undefined(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

PlainArgument dtype_argument(const c10::IValue& value) {
  if (value.isNone()) return {};
  return dtype_of(value.toScalarType());
}

// A complex one has no place on a line.
PlainArgument real_argument(const c10::IValue& value) {
  if (value.isNone() || value.isComplexDouble()) return {};
  return value.toScalar().toDouble();
}

// The list in place of `list`, of its kind.
c10::IValue list_of(const c10::IValue& list, std::vector<at::Tensor> tensors) {
  if (list.isTensorList()) return tensors;
  c10::List<std::optional<at::Tensor>> optional;
  for (at::Tensor& tensor : tensors) {
    optional.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
  }
  return optional;
}

}  // namespace

ArgumentKinds::ArgumentKinds(const c10::FunctionSchema& schema, const std::vector<size_t>& reals) {
  for (const auto& argument : schema.arguments()) {
    const auto kind = without_optional(*argument.real_type()).kind();
    if (kind == c10::TypeKind::DeviceObjType) device_ = kinds_.size();
    kinds_.push_back(kind_of(argument));
  }
  for (const size_t place : reals) kinds_[place] = Kind::kReal;
}

ArgumentKinds::Kind ArgumentKinds::kind_of(const c10::Argument& argument) {
  if (without_optional(*argument.real_type()).kind() == c10::TypeKind::ScalarTypeType)
    return Kind::kDtype;
  const c10::Type& type = without_optional(*argument.type());
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::BoolType:
      return Kind::kPlain;
    case c10::TypeKind::ListType: {
      const auto element = without_optional(*type.containedType(0)).kind();
      return element == c10::TypeKind::TensorType ? Kind::kTensors : Kind::kPlain;
    }
    default:
      return Kind::kOther;
  }
}

size_t ArgumentKinds::operand_at(size_t argument) const {
  return static_cast<size_t>(std::count(
      kinds_.begin(), kinds_.begin() + static_cast<std::ptrdiff_t>(argument), Kind::kTensor));
}

Operands ArgumentKinds::operands_of(const OperatorCall& call) const {
  Operands operands;
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (kinds_[i] == Kind::kTensor) operands.push_back(tensor_or_undefined(call.argument(i)));
    if (kinds_[i] != Kind::kTensors || call.argument(i).isNone()) continue;
    for (const c10::IValue& element : call.argument(i).toListRef()) {
      operands.push_back(tensor_or_undefined(element));
    }
  }
  return operands;
}

std::vector<size_t> ArgumentKinds::arguments_of_operands(const OperatorCall& call) const {
  std::vector<size_t> arguments;
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (kinds_[i] == Kind::kTensor) arguments.push_back(i);
    if (kinds_[i] != Kind::kTensors || call.argument(i).isNone()) continue;
    arguments.insert(arguments.end(), call.argument(i).toListRef().size(), i);
  }
  return arguments;
}

void ArgumentKinds::replace_operands(OperatorCall& call, at::TensorList operands) const {
  auto next = operands.begin();
  for (size_t i = 0; i < kinds_.size(); ++i) {
    c10::IValue& argument = call.argument(i);
    if (kinds_[i] == Kind::kTensor) {
      if (next->defined()) argument = *next;
      ++next;
    } else if (kinds_[i] == Kind::kTensors && !argument.isNone()) {
      const auto end = next + static_cast<std::ptrdiff_t>(argument.toListRef().size());
      argument = list_of(argument, {next, end});
      next = end;
    }
  }
}

std::vector<PlainArgument> ArgumentKinds::plain_of(const OperatorCall& call) const {
  std::vector<PlainArgument> plain(kinds_.size());
  for (size_t i = 0; i < kinds_.size(); ++i) {
    const c10::IValue& argument = call.argument(i);
    if (kinds_[i] == Kind::kPlain) plain[i] = plain_argument(argument);
    if (kinds_[i] == Kind::kDtype) plain[i] = dtype_argument(argument);
    if (kinds_[i] == Kind::kReal) plain[i] = real_argument(argument);
  }
  return plain;
}

Dtype dtype_of(at::ScalarType dtype) {
  return {.number = static_cast<int64_t>(dtype),
          .element_size = static_cast<int64_t>(c10::elementSize(dtype))};
}

PlainArgument plain_argument(const c10::IValue& value) {
  if (value.isBool()) return static_cast<int64_t>(value.toBool());
  if (value.isInt()) return value.toInt();
  if (value.isIntList()) return value.toIntVector();
  if (value.isBoolList()) {
    const auto list = value.toBoolList();
    return std::vector<int64_t>(list.begin(), list.end());
  }
  return std::monostate{};
}

}  // namespace fsdp::internal
