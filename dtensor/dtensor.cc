#include "dtensor/dtensor.h"

#include "device_mesh/on_mesh/claims.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace fsdp {
namespace {

using internal::DTensorSpec;

void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* function) {
  TORCH_CHECK_VALUE(tensor.device().type() == mesh.device_type(), function, ": the tensor is on ",
                    tensor.device(), ", the mesh on ", mesh.device_type(),
                    "; move the tensor there first (rank ", mesh.rank(), ")");
}

// Shard(-1) means the last dimension.
std::vector<Placement> without_negative_dims(std::vector<Placement> placements, int64_t ndim) {
  for (auto& placement : placements) {
    if (placement.is_shard() && placement.shard_dim() < 0)
      placement = placement.along(placement.shard_dim() + ndim);
  }
  return placements;
}

// Global shape when every rank's part is as large as this one's.
std::vector<int64_t> even_shape(const at::Tensor& local, const DeviceMesh& mesh,
                                const std::vector<Placement>& placements) {
  auto shape = local.sizes().vec();
  for (size_t m = 0; m < placements.size() && static_cast<int64_t>(m) < mesh.ndim(); ++m) {
    if (!placements[m].is_shard()) continue;
    const int64_t dim = placements[m].shard_dim();
    TORCH_CHECK_VALUE(dim >= 0 && dim < local.dim(), "from_local: placements: ", placements[m],
                      " is out of range for ", "a local tensor of shape ", local.sizes(), " (rank ",
                      mesh.rank(), ")");
    shape[static_cast<size_t>(dim)] *= mesh.size(static_cast<int64_t>(m));
  }
  return shape;
}

std::string agreement_error(const at::Tensor& local, const DTensorSpec& spec) {
  const auto expected = spec.local_shape();
  if (local.sizes() == at::IntArrayRef(expected)) return {};
  std::ostringstream out;
  out << "from_local: local: shape " << local.sizes() << " does not fit " << to_string(spec)
      << ", of which rank " << spec.mesh().rank() << " holds " << at::IntArrayRef(expected);
  return out.str();
}

// Collective over the mesh.
void check_across_ranks(const at::Tensor& local, const DTensorSpec& spec) {
  internal::Claims claims("from_local");
  const std::string own_error = agreement_error(local, spec);
  if (!own_error.empty()) claims.refuse(own_error);
  claims.add("the tensor", c10::str(local.scalar_type(), " ", to_string(spec.layout()),
                                    ", strides ", at::IntArrayRef(spec.stride())));
  claims.check(spec.mesh(), "pass the same on every rank of the mesh");
}

bool adds_up(const Placement& placement) {
  return !placement.is_partial() || placement.partial_op() == Partial::Op::kSum ||
         placement.partial_op() == Partial::Op::kAvg;
}

// None: as the DTensor lies.
std::optional<DTensorSpec> grad_spec(const at::Tensor& dtensor, const ToLocalOptions& options,
                                     const char* function) {
  if (!options.grad_placements.has_value()) return std::nullopt;
  const DTensorSpec& own = internal::spec_of(dtensor);
  const DTensorSpec spec =
      own.with_placements(without_negative_dims(*options.grad_placements, dtensor.dim()));
  const auto shape = spec.local_shape(), expected = own.local_shape();
  TORCH_CHECK_VALUE(shape == expected, function, ": grad_placements: of ", to_string(spec),
                    " this rank has ", at::IntArrayRef(shape), ", but of the tensor ",
                    at::IntArrayRef(expected), " (rank ", own.mesh().rank(), ")");
  for (const Placement& placement : spec.placements()) {
    TORCH_CHECK_VALUE(adds_up(placement), function, ": grad_placements: ", placement,
                      "; terms of a gradient are added: Partial(sum) or Partial(avg) (rank ",
                      own.mesh().rank(), ")");
  }
  return spec;
}

}  // namespace

DTensor::DTensor(const at::Tensor& tensor) : at::Tensor(tensor) {
  TORCH_CHECK_TYPE(is_dtensor(tensor), "DTensor: the tensor is not distributed",
                   tensor.defined() ? "" : " (it is undefined)",
                   "; make one with fsdp::distribute_tensor or fsdp::from_local");
}

at::Tensor DTensor::to_local(const ToLocalOptions& options) const {
  return internal::differentiable_to_local(*this, grad_spec(*this, options, "to_local"));
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

at::Tensor DTensor::full_tensor(const ToLocalOptions& options) const {
  const internal::CommCauseScope cause(internal::CommCause::kRequest);
  const std::vector<Placement> whole(placements().size(), Replicate{});
  const at::Tensor replicated = internal::differentiable_redistribute(*this, whole);
  return internal::differentiable_to_local(replicated,
                                           grad_spec(replicated, options, "full_tensor"));
}

DTensor DTensor::redistribute(std::vector<Placement> placements) const {
  const internal::CommCauseScope cause(internal::CommCause::kRequest);
  placements = without_negative_dims(std::move(placements), dim());
  // Throws before anything is sent.
  const DTensorSpec target =
      internal::spec_of(*this).with_placements(std::move(placements)).simplified();
  return DTensor(internal::differentiable_redistribute(*this, target.placements()));
}

const DeviceMesh& DTensor::device_mesh() const { return internal::spec_of(*this).mesh(); }
const std::vector<Placement>& DTensor::placements() const {
  return internal::spec_of(*this).placements();
}

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                          std::vector<Placement> placements) {
  TORCH_CHECK_VALUE(tensor.defined(), "distribute_tensor: tensor: undefined (rank ", mesh.rank(),
                    ")");
  TORCH_CHECK_VALUE(!is_dtensor(tensor),
                    "distribute_tensor: tensor: it is distributed already; use "
                    "DTensor::redistribute (rank ",
                    mesh.rank(), ")");
  check_device(tensor, mesh, "distribute_tensor");
  for (const auto& placement : placements) {
    TORCH_CHECK_VALUE(!placement.is_partial(), "distribute_tensor: placements: ", placement,
                      " is not a way to "
                      "distribute a value; allowed: Shard, Replicate (rank ",
                      mesh.rank(), ")");
  }
  placements = without_negative_dims(std::move(placements), tensor.dim());
  DTensorSpec spec =
      DTensorSpec(mesh, std::move(placements), tensor.sizes().vec(), tensor.strides().vec())
          .simplified();
  const at::NoGradGuard no_grad;
  const at::Tensor local = internal::local_part(tensor.detach(), spec).clone();
  at::Tensor result = internal::make_dtensor(local, std::move(spec));
  return DTensor(result.set_requires_grad(tensor.requires_grad()));
}

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                   std::vector<Placement> placements, FromLocalOptions options) {
  TORCH_CHECK_VALUE(local.defined(), "from_local: local: undefined (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(!is_dtensor(local),
                    "from_local: local: it is a DTensor; pass its .to_local() (rank ", mesh.rank(),
                    ")");
  check_device(local, mesh, "from_local");
  const auto ndim =
      options.shape.has_value() ? static_cast<int64_t>(options.shape->size()) : local.dim();
  placements = without_negative_dims(std::move(placements), ndim);
  auto shape = options.shape.has_value() ? *options.shape : even_shape(local, mesh, placements);
  auto stride = options.stride.has_value() ? *options.stride : internal::contiguous_strides(shape);
  const DTensorSpec spec =
      DTensorSpec(mesh, std::move(placements), std::move(shape), std::move(stride)).simplified();
  if (options.check) {
    check_across_ranks(local, spec);
  } else {
    const std::string error = agreement_error(local, spec);
    TORCH_CHECK_VALUE(error.empty(), error);
  }
  return DTensor(internal::differentiable_from_local(local, spec));
}

std::ostream& operator<<(std::ostream& out, const DTensor& dtensor) {
  const auto* const owner = internal::owner_of(dtensor);
  const bool shows_a_copy = owner != nullptr && owner->shows_a_copy();  // of an earlier value
  if (!shows_a_copy) internal::tell_read(dtensor);
  return out << "DTensor of " << to_string(internal::spec_of(dtensor)) << ", this rank's part:\n"
             << internal::local_of(dtensor);
}

}  // namespace fsdp
