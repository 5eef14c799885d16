// A view of a DTensor that can not keep a cut, such as one row of a tensor whose rows lie
// on several ranks. It shows a gathered copy. What is written to it in place is written
// to the tensor that it was taken of, too: each rank writes what it has of it. Where that
// tensor was written since, it is gathered again before the view is read or written: not
// in inference mode, where nothing tells of writes, before reads. Of a registry entry it
// is a view of the member, which has the whole value.
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// A gathered copy of `self`, of which an operator takes a view, that lies as `to`
// (collective). REQUIRES: must_move(spec_of(self), to). Reading that or its views after a
// write, and writing them, is collective like this; one of a registry entry refuses to be
// written, with the name of the parameter.
at::Tensor gathered_for_view(const at::Tensor& self, const std::vector<Placement>& to);

// Whether it shows a gathered copy of what is no registry entry.
bool is_gathered_view(const at::Tensor& dtensor);

// Finishes `call`, which takes a view of `self` that the cut does not allow, with that
// view of the parameter's member, as in training; false where `self` is no registry
// entry. The view is plain, and reading or writing it touches the unit. Local.
bool view_of_member(OperatorCall& call, const at::Tensor& self);

}  // namespace fsdp::internal
