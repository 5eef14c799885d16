// Numbers as text for people. No torch here.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace programs {

// As std::printf() prints them.
template <class... Args>
std::string formatted(const char* pattern, Args... args) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, pattern, args...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, args...);
  return text;
}

// "1 rank", "3 ranks"
std::string counted(int64_t count, std::string_view of);

// "512 bytes", "3.0 KiB", "1.5 MiB", "2.0 GiB"
std::string bytes_in_words(double bytes);

}  // namespace programs
