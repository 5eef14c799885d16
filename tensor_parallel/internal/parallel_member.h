// A parameter of a module as a DTensor, in place.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"
#include "tensor_parallel/internal/first_inputs.h"
#include "tensor_parallel/internal/parameter_uses.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace fsdp::internal {

// What a member and its views carry.
struct MemberStyle final : DTensorStyle {
  ParameterUses uses;
  std::shared_ptr<FirstSteps> steps;  // of the module that was parallelized
  UsesCompared compared;
};

// Gives the member's tensor the global shape, this rank's part as a copy, and the keys of
// a DTensor that the parallel gate meets. number_of_model: as DTensorStyle has it. Local.
void make_parallel_member(const PlannedParameter& parameter, uint32_t number_of_model,
                          const std::shared_ptr<FirstSteps>& steps);

// Null for what is no member, nor a view of one.
MemberStyle* style_of(const at::Tensor& tensor);
const ParameterUses* uses_of(const at::Tensor& tensor);

}  // namespace fsdp::internal
