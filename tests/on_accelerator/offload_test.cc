// Shards in host memory, which a device reads when it comes to it: whoever writes them
// waits for that.
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/default_generator.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <memory>

namespace fsdp::testing {
namespace {

std::shared_ptr<torch::nn::LinearImpl> make_linear() {
  return drawn_from_seed(1, [] { return std::make_shared<torch::nn::LinearImpl>(8, 8); });
}

// No backward, at the end of which the host would wait.
void write_after_use(ProgramRank& rank) {
  const torch::NoGradGuard no_grad;
  const auto model = make_linear();
  fully_shard(*model, rank.mesh(),
              {.reshard_after_forward = true, .offload_policy = {.offload_to_cpu = true}});
  const auto x = torch::linspace(-1, 1, 24).view({3, 8}).to(rank.device());
  for (int step = 0; step < 3; ++step) {
    rank.keep(model->forward(x));
    for (const auto& parameter : model->parameters()) parameter.mul_(0.5);
  }
  rank.keep_parameters(*model);
}

TEST(OffloadedShards, AreWrittenWhenTheDeviceHasReadThem) {
  simulated::install();
  const auto expected = run_on_cpu(write_after_use, 2);
  for (const auto& schedule : schedules_of_programs()) {
    SCOPED_TRACE(to_string(schedule));
    EXPECT_EQ(faults_of(run_on_devices(write_after_use, 2, schedule), expected), "");
  }
}

}  // namespace
}  // namespace fsdp::testing
