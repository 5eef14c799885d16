// How many times longer a test may take than in an ordinary build before it counts as
// hanging.
#pragma once

#include "tests/support/instrumented.h"

namespace fsdp::testing {

#ifdef FSDP_INSTRUMENTED
constexpr int kSlowdown = 10;
#else
constexpr int kSlowdown = 1;
#endif

}  // namespace fsdp::testing
