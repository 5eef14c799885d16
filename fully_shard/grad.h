// Gradients as values instead of in .grad.
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fsdp {

// torch::autograd::grad in which registry entries stand for their members, which are what
// the graph knows. Returns what the unsharded model's call would on this rank: full
// gradients of this rank's outputs, plain tensors, not reduced over the ranks, and
// differentiable with create_graph. Nothing is added to .grad. Other inputs are taken as
// they are.
//
// LibTorch's own functions do not find entries in a graph: autograd::grad throws, and
// backward(inputs) adds nothing to the .grad of an entry among its inputs; where a member
// is among them too it is an error. Members as inputs work: what arrives is reduced into
// their entries' .grad.
//
// Touches parameters as any backward does, so it is collective in effect. Throws what
// torch::autograd::grad throws, and ValueError for an input that is undefined or a view
// of a registry entry.
[[nodiscard]] FSDP_API std::vector<at::Tensor> grad(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& grad_outputs = {},
    std::optional<bool> retain_graph = std::nullopt, bool create_graph = false,
    bool allow_unused = false);

}  // namespace fsdp
