#include "programs/command_line.h"

#include <absl/flags/parse.h>
#include <absl/flags/reflection.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string_view>

namespace programs {
namespace {

void refuse_further_arguments(const std::vector<char*>& left, const std::string& instead) {
  TORCH_CHECK_VALUE(left.size() <= 1, "unexpected argument '", left[1], "': ", instead,
                    "; --help lists the flags");
}

// As a script leaves it whose variable is not set: what is not given has a default, which
// is not what was meant.
void refuse_empty_values(const std::vector<char*>& arguments) {
  for (size_t i = 1; i < arguments.size(); ++i) {
    const std::string_view flag = arguments[i];
    const bool ends_with_its_name = flag.find('=') == flag.size() - 1;  // "--prompt=a=" does not
    const bool is_followed_by_nothing =
        i + 1 < arguments.size() && std::string_view(arguments[i + 1]).empty();
    TORCH_CHECK_VALUE(!flag.starts_with("-") || (!ends_with_its_name && !is_followed_by_nothing),
                      flag, ": has no value; leave the flag out for its default");
  }
}

// A full disk, or a reader that is gone, must not look like success.
int after_output(int exit_code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  std::cerr << "what was printed could not be written (a full disk?)" << std::endl;
  return 1;
}

void show_flags_in_help(const std::vector<std::string>& sources) {
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [sources](absl::string_view file) {
    return std::any_of(sources.begin(), sources.end(), [&](const std::string& source) {
      return file.find(source) != absl::string_view::npos;
    });
  };
  absl::SetFlagsUsageConfig(config);
}

// Abseil ends the program with 1 after --help.
void end_help_with_success(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) != "--help") continue;
    std::atexit([] {
      std::cout.flush();
      std::_Exit(0);
    });
  }
}

}  // namespace

int run_program(int argc, char** argv, const Program& program) {
  absl::SetProgramUsageMessage(program.usage);
  show_flags_in_help(program.flags_of);
  end_help_with_success(argc, argv);
  const std::vector<char*> arguments(argv, argv + argc);
  const auto left = absl::ParseCommandLine(argc, argv);
  try {
    refuse_empty_values(arguments);
    refuse_further_arguments(left, program.about_arguments);
    return after_output(program.run());
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}

int64_t at_least(int64_t least, const absl::Flag<int64_t>& flag) {
  const int64_t value = absl::GetFlag(flag);
  TORCH_CHECK_VALUE(value >= least, "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is ", least, " or more");
  return value;
}

double finite(const absl::Flag<double>& flag) {
  const double value = absl::GetFlag(flag);
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, "--",
                    absl::GetFlagReflectionHandle(flag).Name(), ": ", value,
                    ", allowed is a number of 0 or more");
  return value;
}

std::optional<at::ScalarType> dtype(const absl::Flag<std::string>& flag) {
  const std::string name = absl::GetFlag(flag);
  if (name.empty()) return std::nullopt;
  if (name == "bf16") return at::kBFloat16;
  if (name == "f16") return at::kHalf;
  TORCH_CHECK_VALUE(name == "f32", "--", absl::GetFlagReflectionHandle(flag).Name(), ": ", name,
                    ", allowed are bf16, f16 and f32");
  return at::kFloat;
}

}  // namespace programs
