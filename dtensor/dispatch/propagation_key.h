// The key of a propagator's cache: all that a call's output sharding depends on, as
// numbers.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/bounded_memo.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// This rank's coordinate, the layouts of the operands that are DTensors, by their
// address, the geometry of others, and the plain arguments that matter. REQUIRES:
// DTensors among the operands lie on `mesh`.
void append_propagation_key(const OperatorCall& call, const ArgumentKinds& kinds,
                            at::TensorList operands, const DeviceMesh& mesh, MemoKey& key);

}  // namespace fsdp::internal
