// Members that meet DTensors in operators that record gradients, as (weight -
// reference).pow(2) does whose reference is sharded.
#pragma once

#include "on_demand/gate_arguments.h"

#include <ATen/core/grad_mode.h>

namespace fsdp::internal {

// Puts replicated DTensors, over the same memory, in the place of members that require
// grad, and views of them, where an operator that records a graph has a DTensor besides.
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
