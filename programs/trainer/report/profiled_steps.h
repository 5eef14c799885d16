// Which steps of a run its page shows. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace programs {

struct ProfiledSteps {
  int64_t first = 1, last = 1;  // counted from the first one that this run does
};

// Up to three in the middle of `steps`, or those of --profile, 2 to 4; the first step, in
// which everything is slow, where there is no other.
inline ProfiledSteps profiled_steps(int64_t steps, bool as_profile) {
  if (steps < 2) return {};
  const auto count = std::min<int64_t>(3, steps - 1);
  const auto first = as_profile ? 2 : std::max<int64_t>(2, (steps - count) / 2 + 1);
  return {first, first + count - 1};
}

}  // namespace programs
