// The patterns of a plan. No torch here.
#pragma once

#include <string_view>

namespace fsdp::internal {

// Whether `pattern` means `path`, name by name; a '*' stands for any part of one name.
bool matches_path(std::string_view pattern, std::string_view path);

}  // namespace fsdp::internal
