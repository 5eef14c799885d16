// What ranks on devices tell each other at the end of a backward: what differs is as on
// the CPU, where notices and flags travel with the collectives.
#include "fully_shard/host_exchange.h"

#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/support/errors.h"
#include "tests/support/with_environment.h"
#include "tests/training_programs/ranks_that_differ.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

class RanksOnDevices : public ::testing::TestWithParam<ProgramOfRanks> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

const auto kName = [](const auto& info) { return info.param.name; };

using GradientsOfRanks = RanksOnDevices;

TEST_P(GradientsOfRanks, AreThoseOfCpuInEverySchedule) {
  const auto& [name, ranks, program] = GetParam();
  const auto expected = run_on_cpu(program, ranks);
  for (const auto& schedule : schedules_of_programs()) {
    SCOPED_TRACE(to_string(schedule));
    EXPECT_EQ(faults_of(run_on_devices(program, ranks, schedule), expected), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, GradientsOfRanks, ::testing::ValuesIn(gradients_that_differ()),
                         kName);

using MistakesOfRanks = RanksOnDevices;

// Nothing else of the run is asked for: ranks part.
TEST_P(MistakesOfRanks, AreToldToEveryRankAsOnTheCpu) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");  // CPUs that gather, as devices do
  const auto& [name, ranks, program] = GetParam();
  const auto expected = run_on_cpu(program, ranks);
  for (const auto& schedule : {simulated::kLate, simulated::eager(0)}) {
    SCOPED_TRACE(to_string(schedule));
    const auto run = run_on_devices(program, ranks, schedule);
    EXPECT_EQ(run.error, "");
    EXPECT_EQ(differing_values(run, expected), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, MistakesOfRanks, ::testing::ValuesIn(mistakes_of_ranks()), kName);

// Ranks 2 and 3 find what differs between them, and their replicas are told.
TEST(HostExchange, OfReplicasTellsThatTheRanksOfAnotherDiffer) {
  const TrainingProgram program = [](ProgramRank& rank) {
    const auto mesh = init_device_mesh(rank.device().type(), {2, 2});
    const auto layer = std::make_shared<torch::nn::LinearImpl>(4, 4);
    fully_shard(*layer, mesh);
    {
      const c10::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
    }
    const auto backward = [&] {
      layer->forward(torch::ones({2, 4}).to(rank.device())).sum().backward();
    };
    backward();
    if (rank.rank() != 3) {
      const c10::NoGradGuard guard;
      for (auto& parameter : layer->parameters()) parameter.mul_(2);
    }
    const auto message = message_of(backward);
    EXPECT_THAT(message, ::testing::HasSubstr(rank.rank() < 2 ? "the ranks of replica 1 differ"
                                                              : "not all ranks wrote"));
  };
  EXPECT_EQ(run_on_devices(program, 4, simulated::kLate).error, "");
}

// Of more units than the words of one message.
TEST(HostExchange, OfManyUnitsHasTheGradientsOfCpu) {
  const TrainingProgram program = [](ProgramRank& rank) {
    torch::nn::Sequential layers;
    for (int i = 0; i < 150; ++i) layers->push_back(torch::nn::Linear(1, 1));
    for (const auto& parameter : layers->parameters()) torch::nn::init::constant_(parameter, 0.9);
    for (const auto& layer : layers->children()) fully_shard(*layer, rank.mesh());
    const auto ones = torch::ones({1, 1}).to(rank.device());
    rank.steps(2, [&] {
      auto x = ones;
      // The last layers' biases are used by one rank each.
      for (size_t i = 0; i < layers->size(); ++i) {
        const auto layer = layers->ptr<torch::nn::LinearImpl>(i);
        const bool has_bias = i < 140 || static_cast<int64_t>(i % 2) == rank.rank();
        x = torch::linear(x, layer->weight, has_bias ? layer->bias : at::Tensor());
      }
      x.sum().backward();
      rank.keep_gradients(*layers);
    });
  };
  const auto expected = run_on_cpu(program, 2);
  EXPECT_EQ(faults_of(run_on_devices(program, 2, simulated::kLate), expected), "");
}

class WithoutHostExchange {
 public:
  WithoutHostExchange() { set_host_exchange(false); }
  ~WithoutHostExchange() { set_host_exchange(true); }
  WithoutHostExchange(const WithoutHostExchange&) = delete;
};

TEST(HostExchange, ThatIsOffLeavesZerosForParametersThatNoRankUses) {
  EXPECT_TRUE(host_exchange());
  const WithoutHostExchange off;
  EXPECT_FALSE(host_exchange());
  const TrainingProgram program = [](ProgramRank& rank) {
    const auto layer = std::make_shared<torch::nn::LinearImpl>(4, 4);
    fully_shard(*layer, rank.mesh());
    torch::linear(torch::ones({2, 4}).to(rank.device()), layer->weight).sum().backward();
    const auto unused = layer->parameters()[1].grad();
    EXPECT_TRUE(unused.defined());
    if (unused.defined()) rank.keep(unused);
  };
  const auto run = run_on_devices(program, 2, simulated::kLate);
  ASSERT_EQ(run.error, "");
  for (const auto& values : run.values) EXPECT_TRUE(values.at(0).equal(torch::zeros({4})));
}

}  // namespace
}  // namespace fsdp::testing
