// By what a plan of a call is found again: all that it depends on, as numbers.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/internal/operands.h"
#include "dtensor/ways/bounded_memo.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// The mesh's shape, the operands' geometry and placements (plain ones count as
// replicated), and the plain arguments that matter. The same on all ranks. REQUIRES:
// DTensors among the operands lie on `mesh`.
MemoKey plan_key(const DeviceMesh& mesh, const std::vector<at::Tensor>& operands,
                 const std::vector<PlainArgument>& plain);

}  // namespace fsdp::internal
