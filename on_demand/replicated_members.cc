#include "on_demand/replicated_members.h"

#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

namespace fsdp::internal {
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
                            const DeviceMesh& mesh) {
    const auto& storage = *OnDemandStorage::behind(member);
    context->saved_data["member"] = c10::IValue::make_capsule(
        c10::make_intrusive<MemberOfGroup>(*storage.writable_group(), storage.index()));
    const std::vector<Placement> whole(static_cast<size_t>(mesh.ndim()), Replicate{});
    const KeysOfNewDTensors met_by_gate{c10::DispatchKeySet(kGateKey)};
    const auto replicated =
        make_dtensor(member.detach(), {mesh, whole, member.sizes().vec(), member.strides().vec()});
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

bool is_plain_member(const at::Tensor& tensor) {
  if (!meets_gate(tensor) || is_dtensor(tensor)) return false;
  auto* const storage = OnDemandStorage::of(tensor.unsafeGetTensorImpl());
  if (storage == nullptr || storage->writable_group() == nullptr) return false;
  storage->synchronize_metadata(tensor.unsafeGetTensorImpl());
  return tensor.requires_grad();
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

bool replicate_members(GateArguments& arguments) {
  if (!at::GradMode::is_enabled() || !arguments.is_aten() ||
      !reads_values_of_all(arguments.schema().name()))
    return false;
  const auto mesh = mesh_beside_members(arguments);
  if (!mesh) return false;
  return arguments.replace_each([&mesh](const at::Tensor& tensor) {
    return is_plain_member(tensor) ? ReplicatedMember::apply(tensor, *mesh) : at::Tensor();
  });
}

}  // namespace fsdp::internal
