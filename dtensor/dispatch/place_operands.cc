#include "dtensor/dispatch/place_operands.h"

#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

void check_meshes(const OperatorCall& call, at::TensorList operands, const DeviceMesh& mesh) {
  for (const at::Tensor& operand : operands) {
    TORCH_CHECK_VALUE(!is_dtensor(operand) || spec_of(operand).mesh() == mesh, call.description(),
                      " has operands on different meshes; bring them to one mesh with "
                      ".full_tensor() and fsdp::distribute_tensor. Gradients on several meshes are "
                      "clipped by fsdp::clip_grad_norm_, not LibTorch's (rank ",
                      mesh.rank(), ")");
  }
}

// A number that a caller wrote stays one: it does not decide dtypes.
at::Tensor placed_plain(const at::Tensor& plain, const DeviceMesh& mesh,
                        const TensorPlacements& to) {
  const DTensorSpec from{mesh, replicated_on(mesh), plain.sizes().vec(), plain.strides().vec()};
  at::Tensor placed = redistribute_local(plain, from, to);
  if (plain.unsafeGetTensorImpl()->is_wrapped_number())
    placed.unsafeGetTensorImpl()->set_wrapped_number(true);
  return placed;
}

}  // namespace

DeviceMesh common_mesh(const OperatorCall& call, at::TensorList operands) {
  const auto first = std::find_if(operands.begin(), operands.end(), is_dtensor);
  TORCH_INTERNAL_ASSERT(first != operands.end(), call.name(), " without a DTensor");
  DeviceMesh mesh = spec_of(*first).mesh();
  check_meshes(call, operands, mesh);
  compare_plain(call.handle().schema().name(), operands, mesh);
  return mesh;
}

TensorPlacements replicated_on(const DeviceMesh& mesh) {
  return TensorPlacements(static_cast<size_t>(mesh.ndim()), Replicate{});
}

CallPlacements placements_of(at::TensorList operands, const DeviceMesh& mesh) {
  CallPlacements placements{.mesh_shape = mesh.shape(), .operands = {}};
  for (const at::Tensor& operand : operands) {
    placements.operands.push_back(is_dtensor(operand) ? spec_of(operand).placements()
                                                      : replicated_on(mesh));
  }
  return placements;
}

std::vector<Operand> geometry_of(at::TensorList operands) {
  std::vector<Operand> geometry;
  for (const at::Tensor& operand : operands) {
    geometry.emplace_back();
    if (!operand.defined()) continue;
    geometry.back() = {.shape = operand.sizes().vec(),
                       .stride = operand.strides().vec(),
                       .dtype = dtype_of(operand.scalar_type())};
  }
  return geometry;
}

Operands place_operands(at::TensorList operands, const std::vector<TensorPlacements>& targets) {
  const auto dtensor = std::find_if(operands.begin(), operands.end(), is_dtensor);
  const DeviceMesh mesh = spec_of(*dtensor).mesh();
  Operands locals(operands.begin(), operands.end());
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!operands[i].defined()) continue;
    locals[i] = is_dtensor(operands[i]) ? moved_part(operands[i], targets[i])
                                        : placed_plain(operands[i], mesh, targets[i]);
  }
  return locals;
}

}  // namespace fsdp::internal
