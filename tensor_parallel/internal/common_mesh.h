// Batches that are cut over one dimension of a mesh (context parallelism) and
// tensor-parallel members over another meet on the mesh of both: the dimensions of the
// batch, then those of the members. What comes there is whole along the dimensions that
// it did not have.
#pragma once

#include "device_mesh/device_mesh.h"
#include "on_demand/gate_arguments.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// Puts DTensors on the mesh on which all that are among the arguments can meet in the
// place of those that are not there. True when there were any: the operator must then be
// dispatched anew. Throws ValueError that names two meshes which were not cut from one.
// Local; the backward as that of on_common_mesh().
bool bring_to_common_mesh(GateArguments& arguments);
// Only members and views of them: their input comes there with its style.
bool bring_members_to_common_mesh(GateArguments& arguments);

// The DTensor on `mesh`, whose memory it shares; itself where it is there. It carries the
// parallel gate's key, and a member's style. Differentiable; the backward is collective
// over the dimensions that are new, but for a member of fully_shard whose reduction goes
// over them: its gradient stays this rank's term (OnDemandGroup::gradient_share).
// REQUIRES: the dimensions of its mesh are some of those of `mesh`.
at::Tensor on_common_mesh(const at::Tensor& dtensor, const DeviceMesh& mesh);

// Of a DTensor on a common mesh that is whole along the last dimension, the members': the
// DTensor on the others, without the gate's key. Differentiable. Local, its backward too.
at::Tensor on_mesh_of_batch(const at::Tensor& dtensor);

// The last dimension of a common mesh; any other mesh itself.
DeviceMesh mesh_of_members(const DeviceMesh& mesh);

}  // namespace fsdp::internal
