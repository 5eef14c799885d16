#include "tensor_parallel/internal/placed_input.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/compare_plain.h"
#include "dtensor/internal/differentiable.h"
#include "dtensor/internal/dtensor_impl.h"
#include "on_demand/gate_key.h"
#include "on_demand/touched_groups.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parameter_uses.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using Source = c10::weak_intrusive_ptr<c10::TensorImpl>;

struct Kept {
  Source source;
  uint32_t version;
  Placement to;
  at::Tensor placed;

  bool is_of(const at::Tensor& input, const Placement& wanted, c10::ScalarType dtype) const {
    const bool records = input.requires_grad() && at::GradMode::is_enabled();
    return !source.expired() && source._unsafe_get_target() == input.unsafeGetTensorImpl() &&
           version == version_of(input) && to == wanted && placed.scalar_type() == dtype &&
           placed.requires_grad() == records;
  }
  static uint32_t version_of(const at::Tensor& input) {
    return input.is_inference() ? 0 : static_cast<uint32_t>(input._version());
  }
};

std::optional<Kept>& kept() {
  thread_local std::optional<Kept> kept;
  return kept;
}

at::Tensor on_mesh(const at::Tensor& input, const DeviceMesh& mesh) {
  if (!is_dtensor(input)) {
    return differentiable_from_local(
        input, DTensorSpec(mesh, {Replicate{}}, input.sizes().vec(), input.strides().vec()));
  }
  TORCH_CHECK_VALUE(spec_of(input).mesh() == mesh, "an operator's input lies on ",
                    spec_of(input).mesh(), ", its tensor-parallel parameter on ", mesh,
                    "; bring it there with full_tensor() (rank ", mesh.rank(), ")");
  return input;
}

}  // namespace

at::Tensor placed_as(const at::Tensor& dtensor, const Placement& to) {
  const auto spec =
      spec_of(dtensor).with_placements({counted_from_start(to, dtensor.dim())}).simplified();
  return differentiable_redistribute(dtensor, spec.placements());
}

at::Tensor placed_input(const at::Tensor& input, const DeviceMesh& mesh, const Placement& to,
                        std::optional<c10::ScalarType> dtype) {
  const auto cast = dtype.value_or(input.scalar_type());
  compare_plain("the input of a tensor-parallel operator", input, mesh);
  if (kept().has_value() && kept()->is_of(input, to, cast)) return kept()->placed;
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
  kept().emplace(Kept{.source = Source(input.getIntrusivePtr()),
                      .version = Kept::version_of(input),
                      .to = to,
                      .placed = placed});
  return placed;
}

void forget_input_without_source() {
  if (kept().has_value() && kept()->source.expired()) kept().reset();
}

}  // namespace fsdp::internal
