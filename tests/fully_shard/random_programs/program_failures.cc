#include "tests/fully_shard/random_programs/program_failures.h"

#include "tests/fully_shard/random_programs/program_shrink.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::testing {
namespace {

constexpr size_t kFailuresShrunk = 3;

// The first line of a failure without its numbers: shrinking must not drift from one
// failure to another.
std::string kind_of(const std::string& failure) {
  auto kind = failure.substr(0, std::min(failure.find('\n'), size_t{60}));
  std::erase_if(kind, [](char c) { return c >= '0' && c <= '9'; });
  return kind;
}

}  // namespace

void tell_failures(const ProgramFailures& failures,
                   const std::function<std::string(const Program&)>& failure_of) {
  for (size_t i = 0; i < failures.size(); ++i) {
    const auto& [program, text] = failures[i];
    if (i >= kFailuresShrunk) {
      ADD_FAILURE() << "seed " << program.seed << ": " << text;
      continue;
    }
    const auto small = shrink(program, [&, kind = kind_of(text)](const Program& p) {
      return kind_of(failure_of(p)) == kind;
    });
    ADD_FAILURE() << "seed " << program.seed << ": " << text << "\nshrunk to " << to_string(small)
                  << failure_of(small);
  }
}

}  // namespace fsdp::testing
