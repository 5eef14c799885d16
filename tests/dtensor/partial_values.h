// DTensors of every kind of placement whose whole value is known, for comparison with
// single-process results.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {

struct KnownDTensor {
  DTensor dtensor;
  at::Tensor whole;  // what full_tensor() must give
};

// Small whole numbers from `seed`, the same on all ranks; the terms of a Partial differ
// from rank to rank.
KnownDTensor known_dtensor(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                           const std::vector<int64_t>& shape, uint64_t seed);

// What a Partial of these terms stands for.
at::Tensor reduced(const std::vector<at::Tensor>& terms, Partial::Op op);

// Shard of every dimension, Replicate, and Partial of every op.
std::vector<Placement> every_placement(int64_t ndim);

}  // namespace fsdp::testing
