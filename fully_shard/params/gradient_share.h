// A gradient that comes as a DTensor, as the plain tensor that this rank brings to the
// reduction of its unit. A penalty against sharded values, (weight - reference)², has
// such gradients.
//
// The reduction adds up what the ranks bring and divides by their number, so what a
// DTensor lies as decides what comes back as its value:
//
//   along a dimension of the unit's mesh    a rank brings
//   Replicate()                             what it has
//   Shard(d)                                its own part, once per rank; zeros elsewhere
//   Partial(sum), Partial(avg)              its term, once per rank; its term
//
// Along other dimensions (tensor parallelism) every rank needs the whole, and it moves.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// [the DTensor's global shape], of its dtype. `unit_mesh`: over which the unit's
// reduction goes. Moves nothing where `gradient` lies on that mesh, or on another one
// that ends in its dimensions and along whose other dimensions it is whole; else
// collective over the mesh of `gradient`.
at::Tensor gradient_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh);

}  // namespace fsdp::internal
