// Tensor parallelism of an unmodified torch::nn::Module.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2}, {"tp"});
//   fsdp::parallelize_module(model, mesh, {
//       {"embedding", fsdp::RowwiseParallel{}},
//       {"block*.mlp.up", fsdp::ColwiseParallel{}},
//       {"block*.mlp.down", fsdp::RowwiseParallel{}},
//       {"head", fsdp::ColwiseParallel{}}});
//   torch::optim::AdamW optimizer(model->parameters(), 3e-4);   // after it
//   loss(model->forward(tokens), targets).backward();           // as on one device
//
// The parameters of the plan become DTensors, in place: the module's members keep their
// identity and have the global shape, and this rank holds its part. The module's code
// runs as it is, on global shapes; operators move data where the styles say, or else
// where the rules of DTensors need it. Numbers are those of one device.
//
// Inputs are plain tensors, the same on all ranks of the mesh. What comes out of a style
// whole is plain; all else is a DTensor of global shape, see full_tensor().
//
// Random numbers (dropout) are those of one device as long as the ranks draw from
// generators in the same state: parallelize_module() brings LibTorch's default ones in
// step; manual_seed() (dtensor/manual_seed.h) seeds some of the thread's own.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"
#include "dtensor/dtensor.h"
#include "dtensor/manual_seed.h"
#include "tensor_parallel/parallel_plan.h"

namespace fsdp {

// To be called before the optimizer is made. Every rank must hold the same values, and
// keeps its part of them. Operators that meet the parameters are collective over `mesh`
// from now on; .grad lies as its parameter once backward is done. LibTorch's default
// generator of the mesh's device gets the state that it has on coordinate 0, on all ranks
// that are processes of their own. Parameters of a deferred_init have no values yet:
// ranks must have recorded the same, and materialize() computes their parts. Collective
// over the mesh.
//
// Throws ValueError, leaving the module as it was, for: a mesh that has not one
// dimension, a pattern that matches nothing, or only modules without parameters, a style
// that does not know a parameter that it is given (RowwiseParallel for a norm), units and
// sections that do not divide a dimension, a tied parameter whose styles cut it
// differently; for a parameter that is a DTensor already, sharded by fully_shard, on
// another device than the mesh, not dense, no leaf, or has a .grad; where ranks hold
// different values.
FSDP_API void parallelize_module(ModuleRef module, const DeviceMesh& mesh,
                                 const ParallelPlan& plan);
}  // namespace fsdp
