// Programs with one fault each: the schedules that must find it give wrong values, and
// the order checker names it in every schedule.
#include "tests/simulated_accelerator/hand_written_step.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace fsdp::testing::simulated {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A wait of the step, and the schedule whose values must be wrong without it.
struct OmittedWait {
  Omitted omitted;
  Schedule found_in;
  std::string name;
};

class StepWithoutAWait : public ::testing::TestWithParam<OmittedWait> {};

at::Tensor expected_shards() {
  at::Tensor shards;
  run_in({}, [&] { shards = hand_written_steps(Omitted::kNothing, kDevice); });
  return shards;
}

TEST(HandWrittenStep, IsRightInEverySchedule) {
  const auto expected = expected_shards();
  for (const auto& schedule : schedules(4)) {
    at::Tensor shards;
    const auto report = run_in({.schedule = schedule},
                               [&] { shards = hand_written_steps(Omitted::kNothing, kDevice); });
    EXPECT_TRUE(shards.equal(expected)) << to_string(schedule);
    EXPECT_THAT(report.unordered, IsEmpty()) << to_string(schedule);
  }
}

TEST_P(StepWithoutAWait, IsFound) {
  const auto expected = expected_shards();
  for (const auto& schedule : schedules(4)) {
    at::Tensor shards;
    const auto report = run_in({.schedule = schedule},
                               [&] { shards = hand_written_steps(GetParam().omitted, kDevice); });
    EXPECT_THAT(report.unordered, Not(IsEmpty())) << to_string(schedule);
    if (schedule == GetParam().found_in) {
      EXPECT_FALSE(shards.equal(expected)) << to_string(schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Omitted, StepWithoutAWait,
    ::testing::Values(
        OmittedWait{Omitted::kGatherAfterWrites, eager(1), "GatherAfterWrites"},
        OmittedWait{Omitted::kUseAfterGather, kLate, "UseAfterGather"},
        OmittedWait{Omitted::kGatherAfterCopyOut, eager(1), "GatherAfterCopyOut"},
        OmittedWait{Omitted::kReductionAfterPacking, eager(2), "ReductionAfterPacking"},
        OmittedWait{Omitted::kRowsFreedAfterReduction, kLate, "RowsFreedAfterReduction"},
        OmittedWait{Omitted::kOptimizerAfterReductions, kLate, "OptimizerAfterReductions"},
        OmittedWait{Omitted::kAllocationAfterPacking, eager(2), "AllocationAfterPacking"},
        OmittedWait{Omitted::kOtherStreamAfterCopyOut, eager(3), "OtherStreamAfterCopyOut"},
        OmittedWait{Omitted::kFreedAfterOtherStream, kLate, "FreedAfterOtherStream"}),
    [](const auto& info) { return info.param.name; });

// A side stream computes with what main made, and main with what comes back.
enum class Join { kBoth, kOnlyThere, kOnlyBack };
at::Tensor on_two_streams(Join join) {
  const auto main = current_stream(kDevice), side = open_stream(kDevice);
  const auto input = at::arange(64, at::kFloat).to(kDevice) + 1;
  c10::Event made(kDeviceType), used(kDeviceType);
  made.record(main);
  if (join != Join::kOnlyBack) made.block(side);
  at::Tensor result;
  {
    const c10::StreamGuard on_side(side);
    result = input * 3;
    used.record(side);
  }
  if (join != Join::kOnlyThere) used.block(main);
  return (result + input).cpu();
}

TEST(TwoStreams, JoinedByEventsAreRightInEverySchedule) {
  const auto expected = (at::arange(64, at::kFloat) + 1) * 4;
  for (const auto& schedule : schedules(2)) {
    at::Tensor result;
    const auto report =
        run_in({.schedule = schedule}, [&] { result = on_two_streams(Join::kBoth); });
    EXPECT_TRUE(result.equal(expected)) << to_string(schedule);
    EXPECT_THAT(report.unordered, IsEmpty()) << to_string(schedule);
  }
}

void expect_found(Join join, const Schedule& found_in, const std::string& pair) {
  const auto expected = (at::arange(64, at::kFloat) + 1) * 4;
  for (const auto& schedule : schedules(2)) {
    at::Tensor result;
    const auto report = run_in({.schedule = schedule}, [&] { result = on_two_streams(join); });
    EXPECT_THAT(report.unordered, ::testing::Contains(pair)) << to_string(schedule);
    if (schedule == found_in) {
      EXPECT_FALSE(result.equal(expected)) << to_string(schedule);
    }
  }
}

TEST(TwoStreams, NotJoinedAreReportedWithBothNames) {
  expect_found(Join::kOnlyBack, eager(1),
               "aten::add.Tensor (stream 0) and aten::mul.Tensor (stream 1)");
  expect_found(Join::kOnlyThere, kLate,
               "aten::mul.Tensor (stream 1) and aten::add.Tensor (stream 0)");
}

// The sum that a side stream takes of main's memory, which main frees and writes
// meanwhile.
at::Tensor sum_of_freed_memory(bool waits_before_reuse) {
  const auto main = current_stream(kDevice), side = open_stream(kDevice);
  auto input = at::ones({256}).to(kDevice);
  c10::Event made(kDeviceType), used(kDeviceType);
  made.record(main);
  made.block(side);
  at::Tensor sum;
  {
    const c10::StreamGuard on_side(side);
    sum = input.sum();
    used.record(side);
  }
  input.reset();
  if (waits_before_reuse) used.block(main);
  const auto other = at::full({256}, 7.0, at::TensorOptions(kDevice));
  used.block(main);
  return sum.cpu();
}

TEST(Memory, FreedBeforeAnotherStreamHasReadItIsFound) {
  for (const auto& schedule : schedules(2)) {
    at::Tensor sum;
    const auto right = run_in({.schedule = schedule}, [&] { sum = sum_of_freed_memory(true); });
    EXPECT_EQ(sum.item<float>(), 256) << to_string(schedule);
    EXPECT_THAT(right.unordered, IsEmpty()) << to_string(schedule);
    const auto early = run_in({.schedule = schedule}, [&] { sum = sum_of_freed_memory(false); });
    EXPECT_THAT(early.unordered,
                ::testing::Contains("aten::sum.dim_IntList (stream 1) and allocate (stream 0)"))
        << to_string(schedule);
    if (schedule == kLate) {
      EXPECT_NE(sum.item<float>(), 256);
    }
  }
}

TEST(Memory, PoisonedWhenFreedMustBeFreeOfEveryStreamByThen) {
  const Settings strict = {.poison = Settings::Poison::kWhenFreed};
  const auto report = run_in(strict, [] { sum_of_freed_memory(true); });
  EXPECT_THAT(report.unordered,
              ::testing::Contains("aten::sum.dim_IntList (stream 1) and free (stream 0)"));
}

// A gather whose wait() is left out, over a rank alone.
at::Tensor gathered(World::Wait wait) {
  const auto backend = make_lone_backend({"alone", 0, 2, {0, 1}, std::chrono::seconds(20)}, wait);
  auto input = at::arange(32, at::kFloat).to(kDevice) + 1;
  auto output = at::zeros({64}, at::TensorOptions(kDevice));
  backend->_allgather_base(output, input, {})->wait();
  return (output * 2).cpu();
}

TEST(Collective, WhoseWaitDoesNothingIsFound) {
  for (const auto& schedule : schedules(2)) {
    at::Tensor right, wrong;
    run_in({.schedule = schedule}, [&] { right = gathered(World::Wait::kMakesStreamWait); });
    const auto report =
        run_in({.schedule = schedule}, [&] { wrong = gathered(World::Wait::kDoesNothing); });
    EXPECT_EQ(right.sum().item<float>(), 4 * 32 * 33 / 2) << to_string(schedule);
    EXPECT_THAT(report.unordered, ::testing::Contains(HasSubstr("all-gather")))
        << to_string(schedule);
    if (schedule == kLate) {
      EXPECT_FALSE(wrong.equal(right));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing::simulated
