// Errors of files and formats, thrown: ValueError for what the caller can change, else
// c10::Error.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <string>
#include <utility>

namespace fsdp::internal::checkpoint {

void raise_unless_ok(const absl::Status& status);
// The same error, told of `what`.
absl::Status within(const std::string& what, const absl::Status& status);

template <class Value>
Value value_or_raise(absl::StatusOr<Value> value) {
  raise_unless_ok(value.status());
  return *std::move(value);
}

}  // namespace fsdp::internal::checkpoint
