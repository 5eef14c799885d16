// Operators that work along a tensor dimension need it whole on every rank.
#pragma once

#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operator_call.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// How a tensor that lies as `spec` lies once `dims` (not negative) are whole: mesh
// dimensions of more than one rank that cut one of them replicate it.
std::vector<Placement> placements_whole_along(const DTensorSpec& spec,
                                              const std::vector<int64_t>& dims);

// `tensor`, which `call` reads as its tensor number `operand`, once `dims` are whole:
// itself where they are, else gathered (collective; noted).
at::Tensor whole_along(const OperatorCall& call, size_t operand, const at::Tensor& tensor,
                       const std::vector<int64_t>& dims);

// For what is written and can not be gathered. Throws NotImplementedError when one of
// `dims` is cut by a mesh dimension of more than one rank.
void check_whole_dims(const OperatorCall& call, const DTensorSpec& spec,
                      const std::vector<int64_t>& dims);

}  // namespace fsdp::internal
