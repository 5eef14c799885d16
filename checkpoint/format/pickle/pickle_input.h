// The bytes of a pickle that are not read yet, and the pieces in which opcodes take them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

struct CutOffPickle : std::runtime_error {
  CutOffPickle() : std::runtime_error("it is cut off") {}
};

// What takes more bytes than there are throws CutOffPickle.
class PickleInput {
 public:
  explicit PickleInput(std::string_view bytes) : rest_(bytes) {}

  // How many bytes are not read yet.
  size_t left() const { return rest_.size(); }
  std::string_view take(uint64_t count);
  // Little-endian.
  template <class Number>
  Number number() {
    Number value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  // What is before the next line break, which is taken too.
  std::string line();
  // The number at the beginning of a line; throws std::runtime_error where there is none.
  size_t line_index();

 private:
  std::string_view rest_;
};

}  // namespace fsdp::internal::checkpoint
