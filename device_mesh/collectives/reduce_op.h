// How values of several ranks become one.
#pragma once

namespace fsdp::internal {

enum class ReduceOp { kSum, kMin, kMax, kProduct };

}  // namespace fsdp::internal
