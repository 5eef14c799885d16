#include "on_demand/gate_arguments.h"

#include "dtensor/dispatch/implicit_replication.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string_view>
#include <utility>
#include <vector>

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

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Carries what the backward asks through an AutogradContext.
struct MemberOfGroup final : torch::CustomClassHolder {
  MemberOfGroup(OnDemandGroup& of, int64_t place)
      : group(c10::intrusive_ptr<OnDemandGroup>::reclaim_copy(&of)), index(place) {}
  c10::intrusive_ptr<OnDemandGroup> group;
  int64_t index;
};

class ReplicatedMember : public torch::autograd::Function<ReplicatedMember> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& member,
                            const DTensorSpec& spec) {
    const auto& storage = *OnDemandStorage::behind(member);
    context->saved_data["member"] = c10::IValue::make_capsule(
        c10::make_intrusive<MemberOfGroup>(*storage.writable_group(), storage.index()));
    const KeysOfNewDTensors met_by_gate{c10::DispatchKeySet(kGateKey)};
    const auto replicated = make_dtensor(held_part(member).detach(), spec);
    if (is_dtensor(member)) set_style(replicated, meta_of(member).style);
    // A write to the member is one to what a graph saved of this.
    replicated.unsafeGetTensorImpl()->set_version_counter(
        member.unsafeGetTensorImpl()->version_counter());
    return replicated;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& gradient = gradients[0];
    if (!is_dtensor(gradient)) return {gradient, at::Tensor()};
    const auto member = c10::static_intrusive_pointer_cast<MemberOfGroup>(
        context->saved_data["member"].toCapsule());
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(), "second derivatives (create_graph) of parameter '",
        member->group->parameter_name(member->index),
        "' beside a DTensor: what is derived from this rank's part would be this rank's own. "
        "Compute with the DTensor's full_tensor() (collective; rank ",
        spec_of(gradient).mesh().rank(), ")");
    return {member->group->gradient_share(member->index, gradient), at::Tensor()};
  }
};

at::Tensor replicated_over(const at::Tensor& member, const DeviceMesh& mesh) {
  return replicated_member(
      member, {mesh, std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{}),
               member.sizes().vec(), member.strides().vec()});
}

// Of the DTensors; none where members stay what they are: one is written, or meets what
// comes from a parameter.
std::optional<DeviceMesh> mesh_beside_members(const GateArguments& arguments) {
  std::optional<DeviceMesh> mesh;
  bool stay = false;
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    if (const auto* const meta = find_meta(tensor)) {
      if (!mesh) mesh = meta->spec.mesh();
      stay |= meta->from_parameter;
    } else {
      stay |= writes && meets_gate(tensor);
    }
  });
  return stay ? std::nullopt : mesh;
}

}  // namespace

bool is_recorded_member(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !meets_gate(tensor)) return false;
  auto* const storage = OnDemandStorage::behind(tensor);
  if (storage == nullptr || storage->writable_group() == nullptr) return false;
  storage->synchronize_metadata(tensor.unsafeGetTensorImpl());
  return tensor.requires_grad();
}

at::Tensor replicated_member(const at::Tensor& member, const DTensorSpec& spec) {
  return ReplicatedMember::apply(member, spec);
}

bool replicate_members(GateArguments& arguments) {
  if (!at::GradMode::is_enabled() || !arguments.is_aten() ||
      !reads_values_of_all(arguments.schema().name()))
    return false;
  const auto mesh = mesh_beside_members(arguments);
  if (!mesh) return false;
  return arguments.replace_each([&mesh](const at::Tensor& tensor) {
    const bool is_replaced = !is_dtensor(tensor) && is_recorded_member(tensor);
    return is_replaced ? replicated_over(tensor, *mesh) : at::Tensor();
  });
}

namespace {

ComputeDtype asked_dtype(const GateArguments& arguments) {
  ComputeDtype dtype;
  arguments.for_each([&dtype](const at::Tensor& tensor, bool) {
    if (!meets_gate(tensor)) return;
    const auto* storage = OnDemandStorage::behind(tensor);
    if (storage != nullptr) dtype.meet(*storage, tensor);
  });
  return dtype;
}

// Derivatives compute with what forward saved, in the dtypes that their kernels want: on
// CUDA, the statistics of a norm are float beside weights in 16 bits.
bool keeps_dtypes(const GateArguments& arguments) {
  const std::string_view name = arguments.schema().name();
  if (name.find("_backward") != std::string_view::npos) return true;
  for (const std::string_view other : {"aten::to", "aten::_to_copy", "aten::type_as"}) {
    if (name == other) return true;
  }
  if (name.starts_with("aten::_foreach_")) return true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments.writes(i)) return true;
  }
  return false;
}

// What an operator updates in place without saying so in its schema: running_mean and
// running_var, unless it is told that it does not train.
std::vector<at::Tensor> updated_statistics(const GateArguments& arguments) {
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments.schema().arguments()[i].name();
    const auto& value = arguments[i];
    const bool says_training = name == "training" || name == "train" || name == "use_input_stats";
    if (says_training && value.isBool() && !value.toBool()) return {};
    if (name.starts_with("running_") && value.isTensor() && value.toTensor().defined())
      found.push_back(value.toTensor());
  }
  return found;
}

}  // namespace

bool ComputeDtype::is_to_cast(const at::Tensor& tensor) const {
  return dtype_ && tensor.scalar_type() != *dtype_ && tensor.dim() > 0 &&
         at::isFloatingType(tensor.scalar_type()) && !is_entry_or_view(tensor) &&
         OnDemandStorage::behind(tensor) == nullptr;
}

std::optional<at::ScalarType> dtype_beside(const at::Tensor& parameter, const at::Tensor& input) {
  ComputeDtype dtype;
  const auto* const storage = OnDemandStorage::behind(parameter);
  if (storage != nullptr) dtype.meet(*storage, parameter);
  return dtype.is_to_cast(input) ? dtype.dtype() : std::nullopt;
}

bool call_with_cast_inputs(const c10::OperatorHandle& op, GateArguments& arguments,
                           torch::jit::Stack* stack) {
  const auto dtype = asked_dtype(arguments);
  if (!dtype.is_asked_for() || keeps_dtypes(arguments)) return false;
  const auto statistics = updated_statistics(arguments);
  const bool any = arguments.replace_each([&dtype](const at::Tensor& tensor) {
    return dtype.is_to_cast(tensor) ? dtype.cast(tensor) : at::Tensor();
  });
  if (!any) return false;
  const auto cast = updated_statistics(arguments);
  op.callBoxed(stack);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (!cast[i].is_same(statistics[i])) statistics[i].copy_(cast[i]);
  }
  return true;
}

}  // namespace fsdp::internal
