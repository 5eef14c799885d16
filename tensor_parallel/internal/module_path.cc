#include "tensor_parallel/internal/module_path.h"

namespace fsdp::internal {

bool matches_path(std::string_view pattern, std::string_view path) {
  if (pattern.empty()) return path.empty();
  if (pattern.front() == '*') {
    if (matches_path(pattern.substr(1), path)) return true;
    return !path.empty() && path.front() != '.' && matches_path(pattern, path.substr(1));
  }
  return !path.empty() && pattern.front() == path.front() &&
         matches_path(pattern.substr(1), path.substr(1));
}

}  // namespace fsdp::internal
