// The input of an operator, brought to where its style wants it: once for all that read
// it, as query, key and value do, so that their gradients meet before they are reduced.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::internal {

// The DTensor, placed so along its last mesh dimension, that of tensor parallelism; a
// dimension below zero counts from the end. Collective where data moves. Differentiable.
at::Tensor placed_as(const at::Tensor& dtensor, const Placement& to);

// The same of any tensor: a DTensor on `mesh`, or on some of its dimensions; plain
// tensors count as replicated. The last one of this thread is kept while its source lives
// and can not have changed unseen. Collective where data moves. Differentiable: the
// gradient is plain for what was plain, else placed as the source.
//
// With a `dtype` the input is cast before it moves.
at::Tensor placed_input(const at::Tensor& input, const DeviceMesh& mesh, const Placement& to,
                        std::optional<c10::ScalarType> dtype = {});

// Lets go of the one that is kept, if its source is gone.
void forget_input_without_source();

}  // namespace fsdp::internal
