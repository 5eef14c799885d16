// The placements of gradients: that of a DTensor leaf is redistributed to lie as the
// leaf, since autograd's formulas leave it where they made it.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// Whether `gradient` consists of several terms, one per rank of a mesh of one dimension,
// of what `home` has whole: those of several gradients are summed at once, by
// sum_terms().
bool is_sum_of_terms(const at::Tensor& gradient, const DTensorSpec& home);

// What this rank holds of `gradient` at `home`. A plain gradient counts as whole.
// Collective over the mesh where data moves.
at::Tensor local_at_home(const at::Tensor& gradient, const DTensorSpec& home);

// The sums, in the order of `gradients`, by one all-reduce for each mesh and dtype.
// REQUIRES: is_sum_of_terms() of all. Collective over the meshes.
std::vector<at::Tensor> sum_terms(const std::vector<at::Tensor>& gradients);

}  // namespace fsdp::internal
