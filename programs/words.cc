#include "programs/words.h"

#include <array>

namespace programs {

std::string counted(int64_t count, std::string_view of) {
  return std::to_string(count) + " " + std::string(of) + (count == 1 ? "" : "s");
}

std::string bytes_in_words(double bytes) {
  if (bytes < 1024) return formatted("%.0f bytes", bytes);
  const std::array units = {"KiB", "MiB", "GiB"};
  size_t unit = 0;
  for (bytes /= 1024; bytes >= 1024 && unit + 1 < units.size(); bytes /= 1024) ++unit;
  return formatted("%.1f %s", bytes, units[unit]);
}

}  // namespace programs
