// A view that can not keep a cut shows a gathered copy: the same numbers, but no alias of
// the tensor that it was taken of. Writing it in place would change nothing there, so it
// throws.
#pragma once

#include "dtensor/internal/operator_call.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// `self`, of which `call` takes a view, once it lies as `to`: itself where it does, else
// a gathered copy (collective; noted) that, as its views, refuses to be written. Throws
// NotImplementedError for a registry entry: optimizers write to its views.
at::Tensor gathered_for_view(const OperatorCall& call, const at::Tensor& self,
                             const std::vector<Placement>& to);

bool is_gathered_view(const at::Tensor& dtensor);

}  // namespace fsdp::internal
