#include "on_demand/entry_substitution.h"

#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>

#include <string_view>

namespace fsdp::internal {
namespace {

bool has_entries(const GateArguments& arguments) {
  bool found = false;
  arguments.for_each([&](const at::Tensor& tensor, bool) { found |= is_entry_or_view(tensor); });
  return found;
}

// Operators that make a new tensor of the same geometry: no value is read, so nothing is
// replaced.
bool is_factory(std::string_view name) {
  return name.starts_with("aten::new_") || (name.starts_with("aten::") && name.ends_with("_like"));
}

// to() that has nothing to convert returns its argument: Module::to(dtype) of the same
// dtype.
bool converts_nothing(const GateArguments& arguments) {
  const auto& schema = arguments.schema();
  if (schema.name() != "aten::to") return false;
  const auto& self = arguments[0].toTensor();
  const auto asks_for = [&](const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? arguments[static_cast<size_t>(*index)] : c10::IValue();
  };
  const auto dtype = asks_for("dtype"), device = asks_for("device");
  const auto copy = asks_for("copy"), other = asks_for("other");
  return other.isNone() && (dtype.isNone() || dtype.toScalarType() == self.scalar_type()) &&
         (device.isNone() || device.toDevice().type() == self.device().type()) &&
         (copy.isNone() || !copy.toBool());
}

bool writes_dtensor(const GateArguments& arguments) {
  bool found = false;
  arguments.for_each(
      [&](const at::Tensor& tensor, bool writes) { found |= writes && is_dtensor(tensor); });
  return found;
}

bool keeps_entries(const GateArguments& arguments) {
  return is_factory(arguments.schema().name()) || converts_nothing(arguments) ||
         writes_dtensor(arguments);
}

at::Tensor member_of_trained(const at::Tensor& tensor) {
  if (!is_entry_or_view(tensor) || !tensor.requires_grad()) return {};
  auto* const owner = owner_of(tensor);
  return owner == nullptr ? at::Tensor() : owner->substitute(tensor);
}

// Of an entry its member; of what comes from one, or lies on its mesh, the value
// gathered.
at::Tensor value_of(const at::Tensor& tensor) {
  auto* const owner = is_entry_or_view(tensor) ? owner_of(tensor) : nullptr;
  if (owner == nullptr) return gathered_value(tensor);
  owner->before_whole_read(tensor);
  const at::Tensor member = owner->substitute(tensor);
  return member.defined() ? member : gathered_value(tensor);
}

}  // namespace

bool substitute_entries(GateArguments& arguments) {
  if (!has_entries(arguments) || keeps_entries(arguments)) return false;
  const bool substituted = c10::GradMode::is_enabled() && arguments.replace_each(member_of_trained);
  if (!needs_whole_values(arguments)) return substituted;
  make_whole(arguments, value_of);
  return true;
}

}  // namespace fsdp::internal
