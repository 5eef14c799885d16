// What an exception of LibTorch, of nlohmann's JSON or of the standard library says, as a
// user is told it who has a malformed file.
#pragma once

#include <exception>
#include <string>

namespace fsdp::internal::checkpoint {

// Without what is for those who wrote the code: a stack,
// "[json.exception.type_error.302]", "[enforce fail at inline_container.cc:145]", the
// place of an internal assertion.
std::string plain_text_of(const std::exception& error);

}  // namespace fsdp::internal::checkpoint
