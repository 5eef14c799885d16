// Operators that work along a tensor dimension need it whole on every rank.
#pragma once

#include "dtensor/internal/dtensor_spec.h"
#include "dtensor/internal/operator_call.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Throws NotImplementedError when one of `dims` (not negative) is cut by a mesh dimension
// of more than one rank.
void check_whole_dims(const OperatorCall& call, const DTensorSpec& spec,
                      const std::vector<int64_t>& dims);

}  // namespace fsdp::internal
