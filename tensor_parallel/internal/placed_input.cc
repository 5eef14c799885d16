#include "tensor_parallel/internal/placed_input.h"

#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/common_mesh.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parameter_uses.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using Source = c10::weak_intrusive_ptr<c10::TensorImpl>;
using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

bool is_recorded_input(const at::Tensor& input) {
  return c10::GradMode::is_enabled() && input.requires_grad();
}

uint32_t version_of(const at::Tensor& tensor) { return static_cast<uint32_t>(tensor._version()); }

// Weak, so that no other memory gets its address. Null for parameters on demand.
Memory memory_of(const at::Tensor& input) {
  const at::Tensor& part = held_part(input);
  const bool is_known = part.has_storage() && OnDemandStorage::behind(part) == nullptr;
  return is_known ? Memory(part.storage().getWeakStorageImpl())
                  : Memory(c10::intrusive_ptr<c10::StorageImpl>());
}

bool share_memory(const at::Tensor& input, const at::Tensor& placed) {
  return input.has_storage() && local_of(placed).has_storage() &&
         local_of(placed).storage().is_alias_of(input.storage());
}

struct Kept {
  Source source;
  Memory memory;
  uint32_t version, local_version;
  DeviceMesh mesh;
  Placement to;
  at::Tensor placed;

  bool is_of(const at::Tensor& input, const DeviceMesh& wanted_mesh, const Placement& wanted,
             c10::ScalarType dtype) const {
    return !source.expired() && source._unsafe_get_target() == input.unsafeGetTensorImpl() &&
           to == wanted && placed.scalar_type() == dtype &&
           placed.requires_grad() == is_recorded_input(input) && version == version_of(input) &&
           local_version == version_of(held_part(input)) && memory == memory_of(input) &&
           mesh == wanted_mesh;
  }
};

// Whether everyone who changes `input` afterwards is seen, or changes `placed` too. Not
// who writes by pointer, through data() or in inference mode: so nothing is kept of what
// people fill themselves. What is left are values of a graph, for whose sake it is, and
// what operators of the model made.
bool may_be_kept(const at::Tensor& input, const at::Tensor& placed) {
  if (input.is_inference()) return false;
  if (is_dtensor(input))
    return is_recorded_input(input) || input.unsafeGetTensorImpl()->key_set().has(kParallelKey);
  return is_recorded_input(input) && (!input.is_leaf() || share_memory(input, placed));
}

std::optional<Kept>& kept() {
  thread_local std::optional<Kept> kept;
  return kept;
}

at::Tensor on_mesh(const at::Tensor& input, const DeviceMesh& mesh) {
  if (!is_dtensor(input)) {
    const std::vector<Placement> whole(static_cast<size_t>(mesh.ndim()), Replicate{});
    return differentiable_from_local(
        input, DTensorSpec(mesh, whole, input.sizes().vec(), input.strides().vec()));
  }
  return on_common_mesh(input, mesh);
}

}  // namespace

at::Tensor placed_as(const at::Tensor& dtensor, const Placement& to) {
  auto placements = spec_of(dtensor).placements();
  placements.back() = counted_from_start(to, dtensor.dim());
  const auto spec = spec_of(dtensor).with_placements(std::move(placements)).simplified();
  return differentiable_redistribute(dtensor, spec.placements());
}

at::Tensor placed_input(const at::Tensor& input, const DeviceMesh& mesh, const Placement& to,
                        std::optional<c10::ScalarType> dtype) {
  const auto cast = dtype.value_or(input.scalar_type());
  compare_plain("the input of a tensor-parallel operator", input, mesh);
  if (kept().has_value() && kept()->is_of(input, mesh, to, cast)) return kept()->placed;
  auto keys = c10::DispatchKeySet(kParallelKey);
  TouchedGroups groups;
  if (const auto* const storage = OnDemandStorage::behind(input)) {  // a parameter
    keys = keys.add(kGateKey);
    groups.add(*storage);
  }
  groups.fill();
  const KeysOfNewDTensors parallel(keys);
  at::Tensor placed = placed_as(on_mesh(dtype ? input.to(cast) : input, mesh), to);
  if (placed.is_same(input)) return placed;
  if (!may_be_kept(input, placed)) return placed;
  kept().emplace(Kept{.source = Source(input.getIntrusivePtr()),
                      .memory = memory_of(input),
                      .version = version_of(input),
                      .local_version = version_of(held_part(input)),
                      .mesh = mesh,
                      .to = to,
                      .placed = placed});
  return placed;
}

void forget_input_without_source() {
  if (kept().has_value() && kept()->source.expired()) kept().reset();
}

}  // namespace fsdp::internal
