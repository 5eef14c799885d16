// Bringing the operands of one call to where they are wanted.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/propagate.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// The mesh that the DTensors among the operands lie on. Throws ValueError for several
// meshes, and as compare_plain(). REQUIRES: a DTensor.
DeviceMesh common_mesh(const OperatorCall& call, at::TensorList operands);

TensorPlacements replicated_on(const DeviceMesh& mesh);

// Where the operands lie; plain and absent ones count as replicated.
CallPlacements placements_of(at::TensorList operands, const DeviceMesh& mesh);

std::vector<Operand> geometry_of(at::TensorList operands);

// This rank's parts once every operand lies as `targets` say; absent ones stay absent.
// Collective over the mesh dimensions along which one must move. REQUIRES: a DTensor.
Operands place_operands(at::TensorList operands, const std::vector<TensorPlacements>& targets);

}  // namespace fsdp::internal
