// What an exception says, without the stack frames that c10 adds. Local.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace fsdp::internal {

inline std::string text_of(const std::exception& error) {
  const auto* const rich = dynamic_cast<const c10::Error*>(&error);
  return rich != nullptr ? rich->what_without_backtrace() : error.what();
}

}  // namespace fsdp::internal
