// Sends the values of plain tensors from one rank of a mesh to all others.
//
//   broadcast_tensors({{"parameter 'weight'", weight}, {"buffer 'mask'", mask}}, mesh,
//                     /*src=*/0, /*bucket_bytes=*/int64_t{250} << 20);
//
// One dimension of the mesh after another, so between nodes (the first dimension of a
// hybrid mesh) every byte goes once to each node. Of each dimension's group only the
// ranks take part that have something to send or to get by then.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

struct BroadcastTensor {
  std::string name;  // for errors: "parameter 'l0.weight'"
  at::Tensor tensor;
};

// Writes into each tensor, in place, the bits that rank ranks()[src] of the mesh has.
// Takes bucket_bytes of memory at most, and while a tensor that is not contiguous is on
// its way a copy of it. REQUIRES: the same shapes, dtypes and order on every rank; plain,
// strided tensors whose elements do not overlap, on devices of the mesh's type; grad mode
// off. Collective over the mesh; a failure leaves what was sent before it.
void broadcast_tensors(const std::vector<BroadcastTensor>& tensors, const DeviceMesh& mesh,
                       int64_t src, int64_t bucket_bytes);

}  // namespace fsdp::internal
