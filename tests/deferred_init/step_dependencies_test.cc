// StepDependencies against running random tapes of integer programs.
#include "deferred_init/tape.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::StepDependencies;

// A step that mixes what it reads into what it writes.
struct Mixing {
  std::vector<int64_t> reads, writes;
};

std::vector<uint64_t> run(const std::vector<Mixing>& tape, const std::vector<int64_t>& steps,
                          size_t values) {
  std::vector<uint64_t> state(values, 0);
  for (const auto step : steps) {
    uint64_t mixed = static_cast<uint64_t>(step) + 1;
    for (const auto read : tape[static_cast<size_t>(step)].reads)
      mixed = mixed * 6364136223846793005ull + state[static_cast<size_t>(read)];
    for (const auto write : tape[static_cast<size_t>(step)].writes)
      state[static_cast<size_t>(write)] = ++mixed;
  }
  return state;
}

std::vector<int64_t> up_to(int64_t end) {
  std::vector<int64_t> steps;
  for (int64_t step = 0; step < end; ++step) steps.push_back(step);
  return steps;
}

TEST(StepDependencies, OfAnExample) {
  StepDependencies steps;
  steps.add({}, {0});
  steps.add({}, {1});
  steps.add({0, 1}, {0});
  EXPECT_EQ(steps.needed_for({1}, 3), (std::vector<int64_t>{1}));
  EXPECT_EQ(steps.needed_for({0}, 3), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(steps.needed_for({0}, 2), (std::vector<int64_t>{0}));
  EXPECT_EQ(steps.needed_for({}, 3), (std::vector<int64_t>{}));
  EXPECT_EQ(steps.needed_for({7}, 3), (std::vector<int64_t>{}));
}

TEST(StepDependencies, GiveTheValuesOfTheWholeTapeAndNoStepTooMany) {
  std::mt19937 random(1);
  const auto draw = [&random](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    constexpr int64_t kValues = 4;
    const auto length = draw(9);
    std::vector<Mixing> tape;
    StepDependencies steps;
    for (int64_t i = 0; i < length; ++i) {
      Mixing mixing;
      for (int64_t n = draw(3); n > 0; --n) mixing.reads.push_back(draw(kValues));
      mixing.writes = {draw(kValues)};
      mixing.reads.push_back(mixing.writes.front());  // in place
      steps.add(mixing.reads, mixing.writes);
      tape.push_back(mixing);
    }
    const auto value = draw(kValues), before = draw(length + 1);
    const auto needed = steps.needed_for({value}, before);
    ASSERT_TRUE(std::is_sorted(needed.begin(), needed.end()));
    const auto expected = run(tape, up_to(before), kValues)[static_cast<size_t>(value)];
    ASSERT_EQ(run(tape, needed, kValues)[static_cast<size_t>(value)], expected);
    for (size_t left_out = 0; left_out < needed.size(); ++left_out) {
      auto fewer = needed;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(left_out));
      ASSERT_NE(run(tape, fewer, kValues)[static_cast<size_t>(value)], expected);
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
