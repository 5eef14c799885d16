// What a reduction over tensor dimensions does to placements.
#pragma once

#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operator_call.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// Which dimensions one call reduces, read from its `dim` and `keepdim` arguments (none:
// all of them).
struct ReducedDims {
  static ReducedDims of(OperatorCall& call, const at::Tensor& self);
  static ReducedDims all_of(const at::Tensor& self);

  std::vector<int64_t> dims = {};  // ascending, not negative
  std::vector<bool> reduced = {};  // by tensor dimension
  bool keepdim = false;

  std::vector<int64_t> shape_after(at::IntArrayRef shape) const;
  int64_t dim_after(int64_t dim) const;        // REQUIRES: not reduced
  int64_t count(at::IntArrayRef shape) const;  // elements that become one
};

// Whether some shard of `spec` is cut along a reduced dimension by a mesh dimension of
// more than one rank.
bool crosses_ranks(const DTensorSpec& spec, const ReducedDims& dims);

// The result's spec: Shard along a reduced dimension becomes `across`, other Shards
// follow their dimension.
DTensorSpec reduced_spec(const DTensorSpec& spec, const ReducedDims& dims, const Placement& across);

}  // namespace fsdp::internal
