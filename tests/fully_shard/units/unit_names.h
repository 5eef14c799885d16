#pragma once

#include "fully_shard/fsdp_module.h"

#include <string>
#include <vector>

namespace fsdp::testing {

inline std::vector<std::string> names(const std::vector<FSDPModule>& units) {
  std::vector<std::string> all;
  for (const auto& unit : units) all.push_back(unit.name());
  return all;
}

}  // namespace fsdp::testing
