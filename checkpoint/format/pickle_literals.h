// Numbers and texts as a pickle's opcodes write them: as bytes, or as a line of text in
// protocol 0.
#pragma once

#include "checkpoint/format/pickle.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

Pickled pickled_bool(bool value);
Pickled pickled_integer(int64_t value);
Pickled pickled_text(std::string text);

// Two's complement, little-endian, of any length.
Pickled integer_from_bytes(std::string_view bytes);
// "12", or "12L" as Python 2 wrote it, "00" and "01" for False and True. Throws
// std::runtime_error for what has anything else in it.
Pickled integer_from_line(std::string line);
// Big-endian. REQUIRES: 8 bytes.
Pickled double_from_bytes(std::string_view bytes);
Pickled double_from_line(const std::string& line);
// As repr() writes it; escapes stay.
Pickled text_from_line(const std::string& line);

}  // namespace fsdp::internal::checkpoint
