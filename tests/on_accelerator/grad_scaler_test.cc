// What GradScaler compares between ranks on devices: the scale, and not which parameters
// these are, since replicas may number their units differently there.
#include "fully_shard/grad_scaler.h"

#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace fsdp::testing {
namespace {

class GradScalerOnDevices : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
  // What ranks tell each other at the end of a backward would tell of other numbers.
  void SetUp() override { set_host_exchange(false); }
  void TearDown() override { set_host_exchange(true); }

  static ProgramRun run(const TrainingProgram& program) {
    return run_on_devices(program, 4, simulated::schedules(8).front());
  }
};

torch::nn::Linear layer_of(int64_t width) {
  torch::nn::Linear layer(width, width);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
  return layer;
}

void step(ProgramRank& rank, double scale) {
  const auto mesh = init_device_mesh(rank.device().type(), {2, 2}, {"replicate", "shard"});
  std::optional<torch::nn::Linear> other;  // of the second replica alone
  if (mesh.local_rank(0) == 1) fully_shard(other.emplace(layer_of(2)), mesh["shard"]);
  auto model = layer_of(4);
  fully_shard(model, mesh);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  GradScaler scaler(mesh, {.init_scale = scale});
  scaler.scale(model(torch::ones({1, 4}, rank.device())).sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
}

TEST_F(GradScalerOnDevices, TakesReplicasThatNumberTheirUnitsDifferently) {
  EXPECT_EQ(run([](ProgramRank& rank) { step(rank, 4); }).error, "");
}

TEST_F(GradScalerOnDevices, NamesRanksThatDivideByOtherScales) {
  EXPECT_THAT(run([](ProgramRank& rank) { step(rank, rank.rank() == 3 ? 8 : 4); }).error,
              ::testing::HasSubstr("the scale: rank 0 has 4 where rank 3 has 8"));
}

}  // namespace
}  // namespace fsdp::testing
