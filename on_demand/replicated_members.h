// Members that meet DTensors of the user's own in operators that record gradients, as in
// (weight - reference).pow(2) with a reference from distribute_tensor. What comes from a
// parameter is none of them: it is gathered (dtensor/dispatch/implicit_replication.h).
#pragma once

#include "on_demand/gate_arguments.h"

#include <ATen/core/grad_mode.h>

namespace fsdp::internal {

// Puts replicated DTensors, over the same memory, in the place of members that require
// grad, and views of them, where an operator that records a graph has such a DTensor.
// So the operator runs on parts, and what arrives at the member is plain: autograd adds
// it to this rank's own gradients, and a part or a term of a DTensor's can not be added
// to those (OnDemandGroup::gradient_share). True when there were any: the operator must
// then be dispatched anew. Local; the backward may be collective, and throws
// NotImplementedError where it is to be differentiated itself.
bool replicate_members(GateArguments& arguments);

// Whether an operator with these among its arguments is to be asked at all.
inline bool may_replicate_members(bool has_plain_member, bool has_dtensor) {
  return has_plain_member && has_dtensor && at::GradMode::is_enabled();
}

}  // namespace fsdp::internal
