// Each wait that the library makes between streams is needed: without it a program is
// wrong in some schedule.
#include "fully_shard/transport/streams.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/training_programs/stream_programs.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

namespace fsdp::testing {
namespace {

using internal::StreamWait;

struct Needed {
  const char* name;
  StreamWait wait;
  TrainingProgram program;  // that finds it missing
};

void PrintTo(const Needed& needed, std::ostream* out) { *out << needed.name; }

class StreamWaits : public ::testing::TestWithParam<Needed> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(StreamWaits, AreMissedByAProgram) {
  const auto& needed = GetParam();
  const auto expected = run_on_cpu(needed.program, 2);
  const internal::LeaveOut left_out(needed.wait);
  std::string faults;
  for (const auto& schedule : schedules_of_programs())
    faults += faults_of(run_on_devices(needed.program, 2, schedule), expected);
  EXPECT_NE(faults, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, StreamWaits,
    ::testing::Values(
        Needed{"UseAfterFill", StreamWait::kUseAfterFill, train_with_a_second_branch},
        Needed{"FreeAfterUse", StreamWait::kFreeAfterUse, reshard_by_hand_while_the_side_reads},
        Needed{"RowsFreeAfterCopyOut", StreamWait::kRowsFreeAfterCopyOut,
               gather_here_and_use_on_the_side},
        Needed{"WriteBackAfterWrites", StreamWait::kWriteBackAfterWrites, write_on_the_side},
        Needed{"GatherAfterWriteBack", StreamWait::kGatherAfterWriteBack, write_on_the_side},
        Needed{"AllocateAfterReads", StreamWait::kAllocateAfterReads, train_on_one_stream},
        Needed{"PackAfterAllocation", StreamWait::kPackAfterAllocation, train_on_one_stream},
        Needed{"ReduceAfterPacking", StreamWait::kReduceAfterPacking, train_on_one_stream},
        Needed{"PublishAfterReduction", StreamWait::kPublishAfterReduction, train_on_one_stream},
        Needed{"PackAccumulated", StreamWait::kPackAccumulated, accumulate_on_the_side}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fsdp::testing
