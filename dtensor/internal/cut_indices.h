// Indices into a dimension that is cut, as a rank sees them who has a part of it.
#pragma once

#include "dtensor/internal/shard_layout.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

struct CutIndices {
  at::Tensor in_part;       // counted from the part's begin; 0 for those elsewhere
  at::Tensor is_elsewhere;  // bool, alike
};

// Of `indices` into the whole, the same on all ranks that share the dimension. Local.
CutIndices cut_indices(const at::Tensor& indices, const Chunk& part);

// Throws IndexError, as the operator does on one device, for an index that no rank has:
// outside [0, size). Only CPU tensors are looked at, so that no device is waited for.
void check_indices(const at::Tensor& indices, int64_t size, const char* what);

}  // namespace fsdp::internal
