#include "fake_device/private_use/values_in_calls.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

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
