// A backward that throws on a device, and at once the next step: autograd's own thread
// cleans up after it when backward() has thrown already.
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/slowdown.h"
#include "tests/training_programs/failing_backwards.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::testing {
namespace {

class FailedBackward : public ::testing::TestWithParam<Next> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(FailedBackward, IsCleanedUpBeforeTheNextStep) {
  // The others take fewer layers, and all do where it takes long: under sanitizers.
  const bool takes_all = GetParam() <= Next::kExplicitReshard && kSlowdown == 1;
  for (int64_t throwing = 0; throwing < kFailingLayers; throwing += takes_all ? 1 : 3) {
    const auto program = failing_backwards(throwing, GetParam());
    const auto expected = run_on_cpu(program, 2);
    for (const auto& schedule : schedules_of_programs()) {
      SCOPED_TRACE("layer " + std::to_string(throwing) + ", " + to_string(schedule));
      EXPECT_EQ(faults_of(run_on_devices(program, 2, schedule), expected), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FailedBackward,
                         ::testing::Values(Next::kForward, Next::kExplicitUnshard,
                                           Next::kWriteEntries, Next::kExplicitReshard,
                                           Next::kEndOfUnsharded, Next::kOtherPolicies,
                                           Next::kFullPrecision, Next::kNewSchedule,
                                           Next::kDescription, Next::kDestruction));

}  // namespace
}  // namespace fsdp::testing
