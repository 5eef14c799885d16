// Mixed precision at the gate: operators that meet a parameter which casts inputs
// (OnDemandStorage::cast_inputs) compute with its dtype.
#pragma once

#include "on_demand/gate_arguments.h"

#include <c10/core/ScalarType.h>

namespace fsdp::internal {

// Whether `tensor`, at an operator that computes with `dtype`, is to be cast: a plain
// floating tensor of another dtype and of one dimension or more.
bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype);

// Puts casts in the place of such tensors, differentiably, where an operator meets a
// parameter that casts inputs. Not in operators that write an argument, convert dtypes or
// take lists of a _foreach_. True when there were any: the operator must then be
// dispatched anew. Local.
bool cast_inputs(GateArguments& arguments);

}  // namespace fsdp::internal
