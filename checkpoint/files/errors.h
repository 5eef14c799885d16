// Errors of files, formats and names: what they say to a user, and throwing them:
// ValueError for what the caller can change, else c10::Error.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

void raise_unless_ok(const absl::Status& status);

template <class Value>
Value value_or_raise(absl::StatusOr<Value> value) {
  raise_unless_ok(value.status());
  return *std::move(value);
}

// What an exception of LibTorch, of nlohmann's JSON or of the standard library says, as a
// user is told it who has a malformed file: without what is for those who wrote the code,
// such as a stack, "[json.exception.type_error.302]", "[enforce fail at
// inline_container.cc:145]" or the place of an internal assertion.
std::string plain_text_of(const std::exception& error);

// The first 20 names, and how many more there are.
std::string list_of(const std::vector<std::string>& names);

}  // namespace fsdp::internal::checkpoint
