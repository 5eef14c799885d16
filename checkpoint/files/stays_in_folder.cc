#include "checkpoint/files/stays_in_folder.h"

#include <algorithm>
#include <string_view>

namespace fsdp::internal::checkpoint {

bool stays_in_folder(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string::npos) return false;
  std::string_view rest = name, last;
  while (!rest.empty()) {
    const size_t slash = std::min(rest.find('/'), rest.size());
    last = rest.substr(0, slash);
    if (last == "..") return false;
    rest.remove_prefix(std::min(slash + 1, rest.size()));
  }
  return name.back() != '/' && last != ".";
}

std::string outside_of_folder(const std::string& path, const std::string& name,
                              const std::string& tensor) {
  return path + ": it names the file '" + name + "' for '" + tensor +
         "', which lies outside of its folder";
}

}  // namespace fsdp::internal::checkpoint
