// The edges between DTensors and plain tensors, and between placements, as autograd sees
// them. Each works without autograd too, and is differentiable twice. A gradient lies as
// the value it belongs to, whole (Replicate) where that is Partial.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fsdp::internal {

// A gradient that arrives is this rank's of `gradient`, where that is given.
at::Tensor differentiable_to_local(const at::Tensor& dtensor,
                                   const std::optional<DTensorSpec>& gradient = {});
// Throws NotImplementedError where `local` requires grad and is a term of a minimum,
// maximum or product.
at::Tensor differentiable_from_local(const at::Tensor& local, const DTensorSpec& spec);
// Collective, and its backward too.
at::Tensor differentiable_redistribute(const at::Tensor& dtensor,
                                       const std::vector<Placement>& placements);

// `plain`, the result of a graph, counts as replicated beside a DTensor: the gradient
// that its node gets comes there whole and plain, where autograd's formulas make
// DTensors. Local; the backward is collective where the gradient is cut or terms.
void bring_gradient_whole(const at::Tensor& plain);

// Autograd is running a backward. Its formulas make plain zeros, the same on all ranks,
// where they mean DTensors.
bool inside_backward();

}  // namespace fsdp::internal
