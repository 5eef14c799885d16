// Statistics of rows of which each rank has a part (a maximum, a sum of exponentials): a
// number or two per row is exchanged instead of the rows.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Whether mesh dimension `m` has parts of what lies along one of `dims`.
bool cuts_one_of(const DTensorSpec& spec, size_t m, const std::vector<int64_t>& dims);

// The sum of what the ranks have for rows along `dims` of a tensor that lies as `spec`.
// Collective over the mesh dimensions that cut one of them, one all-reduce each.
at::Tensor summed_across(const at::Tensor& own, const DTensorSpec& spec,
                         const std::vector<int64_t>& dims);

// What the ranks of mesh dimension `m` have, along a new first dimension. One all-gather.
at::Tensor gathered_across(const at::Tensor& own, const DeviceMesh& mesh, size_t m);

}  // namespace fsdp::internal
