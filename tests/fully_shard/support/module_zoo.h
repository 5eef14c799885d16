// A model of every layer type of torch::nn, and of what model code does to parameters.
#pragma once

#include "tests/fully_shard/support/parity.h"

#include <string>
#include <vector>

namespace fsdp::testing {

struct ZooCase {
  std::string name;
  BuildModel build;
};

std::vector<ZooCase> zoo_cases();

}  // namespace fsdp::testing
