// A parameter of a module as a DTensor, in place, and where its gradients go: they lie as
// the member. Those cut alike stay, others are moved when they arrive, and what ranks
// hold as terms of a sum is summed at the end of the backward, for all members at once.
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
// a DTensor that the parallel gate meets. number_of_model: as DTensorStyle has it. Local;
// the member's backwards are collective over its mesh.
void make_parallel_member(const PlannedParameter& parameter, uint32_t number_of_model,
                          const std::shared_ptr<FirstSteps>& steps);

// Null for what is no member, nor a view of one.
MemberStyle* style_of(const at::Tensor& tensor);
const ParameterUses* uses_of(const at::Tensor& tensor);

// Whether autograd is adding `more` to `gradient`, that of a member from an earlier
// backward, and it is seen to here, since `more` lies elsewhere: terms are added at the
// end of the backward, with the others; all else is moved and added at once (collective).
bool is_accumulated_at_home(const at::Tensor& gradient, const at::Tensor& more);

}  // namespace fsdp::internal
