#include "on_demand/input_cast.h"

#include "dtensor/dtensor.h"

#include <string_view>

namespace fsdp::internal {
namespace {

ComputeDtype asked_dtype(const GateArguments& arguments) {
  ComputeDtype dtype;
  arguments.for_each([&dtype](const at::Tensor& tensor, bool) {
    if (!meets_gate(tensor)) return;
    const auto* storage = OnDemandStorage::of(tensor.unsafeGetTensorImpl());
    if (storage != nullptr) dtype.meet(*storage, tensor);
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

bool ComputeDtype::is_to_cast(const at::Tensor& tensor) const {
  return dtype_ && tensor.scalar_type() != *dtype_ && tensor.dim() > 0 &&
         at::isFloatingType(tensor.scalar_type()) && !is_dtensor(tensor) &&
         OnDemandStorage::of(tensor.unsafeGetTensorImpl()) == nullptr;
}

bool cast_inputs(GateArguments& arguments) {
  const auto dtype = asked_dtype(arguments);
  if (!dtype.is_asked_for() || writes_or_converts(arguments)) return false;
  return arguments.replace_each([&dtype](const at::Tensor& tensor) {
    return dtype.is_to_cast(tensor) ? dtype.cast(tensor) : at::Tensor();
  });
}

}  // namespace fsdp::internal
