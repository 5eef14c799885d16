#include "tensor_parallel/internal/common_mesh.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/parallel_gate.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The dimension of `mesh` that is dimension `dim` of `part`; none for that of another
// mesh.
std::optional<size_t> dim_in(const DeviceMesh& mesh, const DeviceMesh& part, int64_t dim) {
  const auto has_name = [&](int64_t own) {
    return !part.dim_names().empty() && !mesh.dim_names().empty() &&
           mesh.dim_names()[static_cast<size_t>(own)] == part.dim_names()[static_cast<size_t>(dim)];
  };
  for (int64_t own = 0; own < mesh.ndim(); ++own)
    if (has_name(own) && mesh.group(own) == part.group(dim)) return static_cast<size_t>(own);
  return std::nullopt;
}

bool is_part_of(const DeviceMesh& part, const DeviceMesh& mesh) {
  for (int64_t dim = 0; dim < part.ndim(); ++dim)
    if (!dim_in(mesh, part, dim)) return false;
  return true;
}

// `spec` on `mesh`, whole along the dimensions that are new.
DTensorSpec expanded(const DTensorSpec& spec, const DeviceMesh& mesh) {
  std::vector<Placement> placements(static_cast<size_t>(mesh.ndim()), Replicate{});
  for (int64_t dim = 0; dim < spec.mesh().ndim(); ++dim)
    placements[dim_in(mesh, spec.mesh(), dim).value()] =
        spec.placements()[static_cast<size_t>(dim)];
  return {mesh, std::move(placements), spec.shape(), spec.stride()};
}

// What `spec` says along the dimensions of `part`.
DTensorSpec narrowed(const DTensorSpec& spec, const DeviceMesh& part) {
  std::vector<Placement> placements;
  for (int64_t dim = 0; dim < part.ndim(); ++dim)
    placements.push_back(spec.placements()[dim_in(spec.mesh(), part, dim).value()]);
  return {part, std::move(placements), spec.shape(), spec.stride()};
}

// The same part as one of `spec`.
at::Tensor relaid(const at::Tensor& dtensor, const DTensorSpec& spec) {
  const at::Tensor laid = make_dtensor(local_of(dtensor).detach(), spec);
  if (!laid.is_inference())
    laid.unsafeGetTensorImpl()->set_version_counter(
        dtensor.unsafeGetTensorImpl()->version_counter());
  if (meta_of(dtensor).style) set_style(laid, meta_of(dtensor).style);
  return laid;
}

struct SavedSpec final : torch::CustomClassHolder {
  explicit SavedSpec(DTensorSpec saved) : spec(std::move(saved)) {}
  DTensorSpec spec;
};

// Between meshes of which one has the dimensions of the other: the gradient of what lay
// as `from` lies so, whole where that was terms. Differentiable twice.
class ChangeMesh : public torch::autograd::Function<ChangeMesh> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor,
                            const DTensorSpec& to) {
    context->saved_data["from"] = c10::IValue::make_capsule(
        c10::make_intrusive<SavedSpec>(spec_of(dtensor).without_partials()));
    context->saved_data["is_parallel"] = dtensor.unsafeGetTensorImpl()->key_set().has(kParallelKey);
    return relaid(dtensor, to);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const DTensorSpec from =
        c10::static_intrusive_pointer_cast<SavedSpec>(context->saved_data["from"].toCapsule())
            ->spec;
    const KeysOfNewDTensors keys(context->saved_data["is_parallel"].toBool()
                                     ? c10::DispatchKeySet(kParallelKey)
                                     : c10::DispatchKeySet());
    return {brought(gradients[0], from), at::Tensor()};
  }

 private:
  static at::Tensor brought(const at::Tensor& gradient, const DTensorSpec& from) {
    if (!is_dtensor(gradient)) return make_dtensor(local_part(gradient, from), from);
    const DeviceMesh& mesh = spec_of(gradient).mesh();
    const bool widens = from.mesh().ndim() < mesh.ndim();
    const auto there = widens ? expanded(from, mesh) : narrowed(from, mesh);
    const CommCauseScope cause(CommCause::kGradient);
    const at::Tensor placed = differentiable_redistribute(gradient, there.placements());
    if (!at::GradMode::is_enabled() || !placed.requires_grad()) return relaid(placed, from);
    return ChangeMesh::apply(placed, from);
  }
};

at::Tensor changed_mesh(const at::Tensor& dtensor, const DTensorSpec& to) {
  tell_read(dtensor);
  if (!at::GradMode::is_enabled() || !dtensor.requires_grad()) return relaid(dtensor, to);
  return ChangeMesh::apply(dtensor, to);
}

// On which all DTensors among the arguments can meet; none where they are on one mesh
// already, or none of them meets the gate.
std::optional<DeviceMesh> mesh_for_all(const GateArguments& arguments) {
  std::optional<DeviceMesh> of_batch, of_members;
  bool is_one = true;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    const auto* const meta = find_meta(tensor);
    if (meta == nullptr || meta->from_parameter) return;
    auto& mesh = meets_parallel_gate(tensor) ? of_members : of_batch;
    const DeviceMesh& more = meta->spec.mesh();
    if (mesh == more) return;
    is_one &= !mesh.has_value();
    if (!mesh || is_part_of(*mesh, more)) {
      mesh = more;
    } else if (!is_part_of(more, *mesh)) {
      mesh = mesh->beside(more);
    }
  });
  if (!of_members || (is_one && (!of_batch || *of_batch == *of_members))) return std::nullopt;
  if (!of_batch || is_part_of(*of_batch, *of_members)) return of_members;
  return of_batch->beside(*of_members);
}

// What is written would be another tensor than the caller's.
void check_writes_none_elsewhere(const GateArguments& arguments, const DeviceMesh& mesh) {
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    if (!writes || !is_dtensor(tensor) || spec_of(tensor).mesh() == mesh) return;
    TORCH_CHECK_NOT_IMPLEMENTED(false, arguments.schema().name(), " writes a DTensor on ",
                                spec_of(tensor).mesh(), " beside one that needs ", mesh,
                                "; compute out of place, as in x = x + y (rank ", mesh.rank(), ")");
  });
}

template <class Comes>
bool bring(GateArguments& arguments, const Comes& comes) {
  const auto mesh = mesh_for_all(arguments);
  if (!mesh) return false;
  check_writes_none_elsewhere(arguments, *mesh);
  return arguments.replace_each([&](const at::Tensor& tensor) {
    const auto* const meta = find_meta(tensor);
    const bool is_elsewhere =
        meta != nullptr && !meta->from_parameter && meta->spec.mesh() != *mesh;
    return is_elsewhere && comes(*meta) ? on_common_mesh(tensor, *mesh) : at::Tensor();
  });
}

}  // namespace

bool bring_to_common_mesh(GateArguments& arguments) {
  return bring(arguments, [](const DTensorMeta&) { return true; });
}

bool bring_members_to_common_mesh(GateArguments& arguments) {
  return bring(arguments, [](const DTensorMeta& meta) { return meta.style != nullptr; });
}

at::Tensor on_common_mesh(const at::Tensor& dtensor, const DeviceMesh& mesh) {
  if (spec_of(dtensor).mesh() == mesh) return dtensor;
  auto keys = c10::DispatchKeySet(kParallelKey);
  if (meets_gate(dtensor)) keys = keys.add(kGateKey);
  const KeysOfNewDTensors parallel(keys);
  const DTensorSpec there = expanded(spec_of(dtensor), mesh);
  if (is_recorded_member(dtensor)) return replicated_member(dtensor, there);
  return changed_mesh(dtensor, there);
}

at::Tensor on_mesh_of_batch(const at::Tensor& dtensor) {
  const DTensorSpec& spec = spec_of(dtensor);
  const auto& names = spec.mesh().dim_names();
  const DeviceMesh mesh = spec.mesh()[std::vector<std::string>(names.begin(), names.end() - 1)];
  return changed_mesh(dtensor, narrowed(spec, mesh));
}

DeviceMesh mesh_of_members(const DeviceMesh& mesh) {
  return mesh.ndim() == 1 ? mesh : mesh[mesh.dim_names().back()];
}

}  // namespace fsdp::internal
