// How many times longer a test may take than in an ordinary build before it counts as hanging.
#pragma once

namespace fsdp::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowdown = 10;
#else
constexpr int kSlowdown = 1;
#endif

}  // namespace fsdp::testing
