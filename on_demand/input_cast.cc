#include "on_demand/input_cast.h"

#include "dtensor/dtensor.h"
#include "on_demand/on_demand_storage.h"

#include <optional>
#include <string_view>

namespace fsdp::internal {
namespace {

// Of the first parameter that casts inputs.
std::optional<at::ScalarType> asked_dtype(const GateArguments& arguments) {
  std::optional<at::ScalarType> dtype;
  arguments.for_each([&dtype](const at::Tensor& tensor, bool) {
    if (dtype || !meets_gate(tensor) || !at::isFloatingType(tensor.scalar_type())) return;
    const auto* storage = OnDemandStorage::of(tensor.unsafeGetTensorImpl());
    if (storage != nullptr && storage->casts_inputs()) dtype = tensor.scalar_type();
  });
  return dtype;
}

bool writes_or_converts(const GateArguments& arguments) {
  const std::string_view name = arguments.schema().name();
  for (const std::string_view other : {"aten::to", "aten::_to_copy", "aten::type_as"}) {
    if (name == other) return true;
  }
  if (name.starts_with("aten::_foreach_")) return true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments.writes(i)) return true;
  }
  return false;
}

}  // namespace

bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() != dtype && tensor.dim() > 0 &&
         at::isFloatingType(tensor.scalar_type()) && !is_dtensor(tensor) &&
         OnDemandStorage::of(tensor.unsafeGetTensorImpl()) == nullptr;
}

bool cast_inputs(GateArguments& arguments) {
  const auto dtype = asked_dtype(arguments);
  if (!dtype || writes_or_converts(arguments)) return false;
  return arguments.replace_each([dtype](const at::Tensor& tensor) {
    return needs_cast(tensor, *dtype) ? tensor.to(*dtype) : at::Tensor();
  });
}

}  // namespace fsdp::internal
