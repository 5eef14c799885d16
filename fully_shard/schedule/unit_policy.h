// What a user asked of one unit, as data: read by whoever decides when the unit is
// gathered, resharded and reduced. Free of tensors, so that deciding can be tested alone.
#pragma once

#include <optional>

namespace fsdp::internal {

struct UnitPolicy {
  std::optional<bool> reshard_after_forward = {};  // unset: true, and false for a root
  bool reshard_after_backward = true;
  bool synchronize_gradients = true;  // false: backwards leave full gradients pending
  bool all_reduce_gradients = true;   // hybrid sharding: false keeps the sums over the shards
  bool reduce_unused_params = false;  // reduce what nobody used too: zeros
  bool prefetch_in_backward = true;
  bool prefetch_after_gradients = false;              // in backward: not when the unit is entered
  bool full_precision = false;                        // param_dtype is not applied
  std::optional<double> gradient_divide_factor = {};  // unset: the number of ranks
};

}  // namespace fsdp::internal
