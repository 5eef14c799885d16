// What the programs of this folder do with their command lines.
#pragma once

#include <absl/flags/declare.h>
#include <absl/flags/flag.h>
#include <absl/flags/reflection.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace programs {

struct Program {
  std::string usage;                  // what --help begins with
  std::vector<std::string> flags_of;  // the sources whose flags --help shows
  std::string about_arguments;        // what to do instead of arguments that are no flags
  std::function<int()> run;           // gives the exit code
};

// Parses the flags and runs the program. Errors become one line on stderr, and exit code
// 1, which output that is lost is, too.
int run_program(int argc, char** argv, const Program& program);

// Whether a flag has another value than its default.
template <class T>
bool is_given(const absl::Flag<T>& flag) {
  const auto& handle = absl::GetFlagReflectionHandle(flag);
  return handle.CurrentValue() != handle.DefaultValue();
}

// The values of flags. Each throws ValueError that names the flag, its value and what is
// allowed.
int64_t at_least(int64_t least, const absl::Flag<int64_t>& flag);
double finite(const absl::Flag<double>& flag);  // and 0 or more
// bf16, f16 or f32; nothing where it is empty.
std::optional<c10::ScalarType> dtype(const absl::Flag<std::string>& flag);

}  // namespace programs
