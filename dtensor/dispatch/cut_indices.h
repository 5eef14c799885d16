// Indices into a dimension that is cut, as a rank sees them who has a part of it.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

struct CutIndices {
  at::Tensor in_part;       // as the part counts; 0 for those elsewhere
  at::Tensor is_elsewhere;  // bool, alike
};

// Of `indices` into dimension `dim` of a tensor that lies as `spec`, the same on all
// ranks that share the dimension. Local.
CutIndices cut_indices(const at::Tensor& indices, const DTensorSpec& spec, int64_t dim);

// Which elements of dimension `dim` this rank has of a tensor that lies so, in order:
// where each element of its part stands in the whole. Local.
at::Tensor elements_of_part(const DTensorSpec& spec, int64_t dim);

// Throws IndexError, as the operator does on one device, for an index that no rank has:
// outside [0, size). Only CPU tensors are looked at, so that no device is waited for.
void check_indices(const at::Tensor& indices, int64_t size, const char* what);

}  // namespace fsdp::internal
