// What random programs must be seen to do: the rows of the coverage table.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct Feature {
  std::string name;
  std::function<bool(const Program&)> has;
};

const std::vector<Feature>& features();

}  // namespace fsdp::testing
