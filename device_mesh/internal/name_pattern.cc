#include "device_mesh/internal/name_pattern.h"

#include <algorithm>
#include <cstddef>

namespace fsdp::internal {
namespace {

bool match_rest(std::string_view pattern, std::string_view name, NameMatch& found) {
  if (pattern.empty()) {
    found.below = name;
    return name.empty() || name.front() == '.';
  }
  if (pattern.front() != '*')
    return !name.empty() && name.front() == pattern.front() &&
           match_rest(pattern.substr(1), name.substr(1), found);
  const size_t end = std::min(name.find('.'), name.size());
  for (size_t length = 0; length <= end; ++length) {
    found.stars.push_back(name.substr(0, length));
    if (match_rest(pattern.substr(1), name.substr(length), found)) return true;
    found.stars.pop_back();
  }
  return false;
}

}  // namespace

std::optional<NameMatch> match_name(std::string_view pattern, std::string_view name) {
  NameMatch found;
  if (!match_rest(pattern, name, found)) return std::nullopt;
  return found;
}

bool is_match(std::string_view pattern, std::string_view name) {
  const auto found = match_name(pattern, name);
  return found && found->below.empty();
}

}  // namespace fsdp::internal
