#include "checkpoint/format/pickle_literals.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {

using Kind = Pickled::Kind;

Pickled pickled_bool(bool value) { return {.kind = Kind::kBool, .integer = value}; }

Pickled pickled_integer(int64_t value) { return {.kind = Kind::kInt, .integer = value}; }

Pickled pickled_text(std::string text) { return {.kind = Kind::kString, .text = std::move(text)}; }

Pickled integer_from_bytes(std::string_view bytes) {
  if (bytes.size() > sizeof(int64_t)) return {.kind = Kind::kLong, .text = std::string(bytes)};
  int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return pickled_integer(value);
}

Pickled integer_from_line(std::string line) {
  if (line == "00" || line == "01") return pickled_bool(line == "01");
  if (line.ends_with('L')) line.pop_back();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (end != line.data() + line.size()) throw std::runtime_error("an integer is malformed");
  if (error != std::errc()) return {.kind = Kind::kLong, .text = std::move(line)};
  return pickled_integer(value);
}

Pickled double_from_bytes(std::string_view bytes) {
  char reversed[sizeof(double)];
  for (size_t i = 0; i < sizeof(double); ++i) reversed[i] = bytes[sizeof(double) - 1 - i];
  double value = 0;
  std::memcpy(&value, reversed, sizeof(value));
  return {.kind = Kind::kDouble, .number = value};
}

Pickled double_from_line(const std::string& line) {
  return {.kind = Kind::kDouble, .number = std::strtod(line.c_str(), nullptr)};
}

Pickled text_from_line(const std::string& line) {
  const bool is_quoted = line.size() >= 2 && line.front() == line.back();
  return pickled_text(is_quoted ? line.substr(1, line.size() - 2) : line);
}

}  // namespace fsdp::internal::checkpoint
