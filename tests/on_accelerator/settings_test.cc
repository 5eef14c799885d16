// Training with the settings that lead gradients and parameters other ways: the bits of
// the CPU in every schedule.
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/training_programs/training_settings.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

constexpr int64_t kRanks = 4;
constexpr int kStreamsOfTwoDimensions = 8;

class TrainingSettings : public ::testing::TestWithParam<Setting> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(TrainingSettings, HaveTheBitsOfCpuInEverySchedule) {
  const auto program = training_with(GetParam());
  const auto expected = run_on_cpu(program, kRanks);
  for (const auto& schedule : simulated::schedules(kStreamsOfTwoDimensions)) {
    SCOPED_TRACE(to_string(schedule));
    EXPECT_EQ(faults_of(run_on_devices(program, kRanks, schedule), expected), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, TrainingSettings, ::testing::ValuesIn(training_settings()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::testing
