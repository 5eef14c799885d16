// A view that can not keep a cut shows a gathered copy: the same numbers, but no alias of
// the tensor that it was taken of. Writing it in place would change nothing there, so it
// throws. Of a registry entry it is a view of the member, which has the whole value.
#pragma once

#include "dtensor/internal/operator_call.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// `self`, of which `call` takes a view, once it lies as `to`: itself where it does, else
// a gathered copy (collective; noted) that, as its views, refuses to be written, with the
// name of the parameter that it was taken of, if any.
at::Tensor gathered_for_view(const OperatorCall& call, const at::Tensor& self,
                             const std::vector<Placement>& to);

// Finishes `call`, which takes a view of `self` that the cut does not allow, with that
// view of the parameter's member, as in training; false where `self` is no registry
// entry. The view is plain, and reading or writing it touches the unit. Local.
bool view_of_member(OperatorCall& call, const at::Tensor& self);

}  // namespace fsdp::internal
