// A parameter of a module as a DTensor, in place.
#pragma once

#include "tensor_parallel/internal/parameter_uses.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// Gives the member's tensor the global shape, this rank's part as a copy, and the keys of
// a DTensor that the parallel gate meets. Local.
void make_parallel_member(const PlannedParameter& parameter);

// Null for what is no member, nor a view of one.
const ParameterUses* uses_of(const at::Tensor& tensor);

}  // namespace fsdp::internal
