#include "checkpoint/plan/left_alone.h"

#include "device_mesh/internal/name_pattern.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp::internal::checkpoint {

bool LeftAlone::has(const std::vector<std::string>& names) {
  bool found = false;
  for (const auto& pattern : patterns_) {
    const auto means = [&](const auto& name) { return match_name(pattern, name).has_value(); };
    if (std::none_of(names.begin(), names.end(), means)) continue;
    unused_.erase(pattern);
    found = true;
  }
  return found;
}

void LeftAlone::check_all_used() const {
  TORCH_CHECK_VALUE(unused_.empty(), "LoadOptions::leave: '", *unused_.begin(),
                    "' means no name of a model or of State::tensors");
}

}  // namespace fsdp::internal::checkpoint
