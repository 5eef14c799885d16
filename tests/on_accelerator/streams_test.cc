// Programs that use a second stream: the bits of the CPU in every schedule, no access
// that nothing orders, and no host that waits or asks whether something is done.
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/training_programs/stream_programs.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class StreamPrograms : public ::testing::TestWithParam<NamedProgram> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(StreamPrograms, HaveTheBitsOfCpuInEverySchedule) {
  const auto& program = GetParam().program;
  const auto expected = run_on_cpu(program, 2);
  for (const auto& schedule : schedules_of_programs()) {
    SCOPED_TRACE(to_string(schedule));
    const auto run = run_on_devices(program, 2, schedule);
    EXPECT_EQ(faults_of(run, expected), "");
    for (const auto& device : run.report.devices) EXPECT_EQ(device.queries.total, 0);
    // LibTorch's engine calls it for gradients that go from one stream to another.
    if (GetParam().gradients == Gradients::kStayOnTheirStream) {
      for (const auto& device : run.report.devices) EXPECT_EQ(device.record_streams, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, StreamPrograms, ::testing::ValuesIn(stream_programs()),
                         [](const auto& info) { return info.param.name; });

// Making a mesh of two dimensions asks the device something, so that is not counted.
TEST(StreamsOfHfsdp, HaveTheBitsOfCpuInEverySchedule) {
  simulated::install();
  const auto expected = run_on_cpu(write_pieces_on_the_side, 2);
  for (const auto& schedule : schedules_of_programs()) {
    SCOPED_TRACE(to_string(schedule));
    EXPECT_EQ(faults_of(run_on_devices(write_pieces_on_the_side, 2, schedule), expected), "");
  }
}

}  // namespace
}  // namespace fsdp::testing
