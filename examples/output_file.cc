#include "examples/output_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace examples {

void check_output_file(const char* flag, const std::string& path) {
  if (path.empty()) return;
  const bool is_new = !std::filesystem::exists(path);
  errno = 0;
  const bool opens = std::ofstream(path, std::ios::app).is_open();
  TORCH_CHECK_VALUE(opens, flag, ": ", path, " cannot be written: ", std::strerror(errno));
  if (is_new) std::remove(path.c_str());
}

}  // namespace examples
