#include "on_demand/entry_substitution.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
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

// Operators that read the shape or the dtype of their second tensor, not its values.
bool reads_values_of_all(std::string_view name) {
  for (const std::string_view other :
       {"aten::to", "aten::type_as", "aten::expand_as", "aten::view_as", "aten::reshape_as"}) {
    if (name == other) return false;
  }
  return true;
}

// Of the tensors that meet each other in an operator. Counts dimensions, not elements,
// whose number differs between ranks.
struct Company {
  const DTensorSpec* entry = nullptr;              // of a registry entry, or a view of one
  bool plain = false;                              // a plain tensor of one dimension or more
  c10::SmallVector<const DTensorSpec*, 2> others;  // of DTensors that belong to no module

  void add(const at::Tensor& tensor) {
    if (is_entry_or_view(tensor)) {
      entry = &spec_of(tensor);
    } else if (is_dtensor(tensor)) {
      others.push_back(&spec_of(tensor));
    } else if (tensor.dim() > 0) {
      plain = true;
    }
  }
  // A DTensor on another mesh was computed by a tensor-parallel module.
  bool needs_whole_values() const {
    if (entry == nullptr || !(plain || !others.empty())) return false;
    return std::none_of(others.begin(), others.end(), [this](const DTensorSpec* other) {
      return other->mesh() == entry->mesh();
    });
  }
};

// Element i of every list of a _foreach_ operator meets element i of the others only.
bool lists_need_whole_values(const GateArguments& arguments) {
  c10::SmallVector<Company, 16> companies;
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (!arguments[a].isTensorList()) continue;
    const auto elements = arguments[a].toListRef();
    if (companies.size() < elements.size()) companies.resize(elements.size());
    for (size_t i = 0; i < elements.size(); ++i) companies[i].add(elements[i].toTensor());
  }
  return std::any_of(companies.begin(), companies.end(),
                     [](const Company& company) { return company.needs_whole_values(); });
}

bool needs_whole_values(const GateArguments& arguments) {
  const std::string_view name = arguments.schema().name();
  if (name.starts_with("aten::_foreach_")) return lists_need_whole_values(arguments);
  Company company;
  arguments.for_each([&](const at::Tensor& tensor, bool) { company.add(tensor); });
  return company.needs_whole_values() && reads_values_of_all(name);
}

at::Tensor member_of_trained(const at::Tensor& tensor) {
  if (!is_entry_or_view(tensor) || !tensor.requires_grad()) return {};
  auto* const owner = owner_of(tensor);
  return owner == nullptr ? at::Tensor() : owner->substitute(tensor);
}

at::Tensor whole_value(const at::Tensor& tensor) {
  if (!is_entry_or_view(tensor)) return {};
  auto* const owner = owner_of(tensor);
  if (owner == nullptr) return {};
  owner->before_whole_read(tensor);
  const at::Tensor member = owner->substitute(tensor);
  if (member.defined()) return member;
  const at::NoGradGuard no_grad;
  return DTensor(tensor).full_tensor();
}

}  // namespace

bool substitute_entries(GateArguments& arguments) {
  if (!has_entries(arguments) || keeps_entries(arguments)) return false;
  bool substituted = c10::GradMode::is_enabled() && arguments.replace_each(member_of_trained);
  if (needs_whole_values(arguments)) substituted |= arguments.replace_each(whole_value);
  return substituted;
}

}  // namespace fsdp::internal
