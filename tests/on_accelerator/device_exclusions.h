// What random programs leave out on a device, each for a reason.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct Exclusion {
  std::string feature, reason;
  std::function<void(Program&)> leave_out;
};

const std::vector<Exclusion>& device_exclusions();

// generate(seed) without what they leave out.
Program generate_for_devices(uint64_t seed);

}  // namespace fsdp::testing
