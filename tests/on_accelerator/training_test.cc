// Sharded training on a device: the bits of CPU over Gloo in every schedule, no access
// that nothing orders, and a host that waits for nothing.
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/default_generator.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using simulated::Report;
using simulated::World;
using ::testing::IsEmpty;

constexpr int64_t kVocabulary = 11;
constexpr int kSteps = 4;
constexpr int kStreams = 4;  // of each device, the default one among them

struct FiveLayers : torch::nn::Module {
  FiveLayers() {
    register_module("embedding", embedding);
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    register_module("last", last);
    scale = register_buffer("scale", torch::linspace(0.5, 1.5, 32));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto x = norm(second(torch::relu(first(embedding(tokens)))));
    return last(torch::gelu(x * scale));
  }

  torch::nn::Embedding embedding{kVocabulary, 16};
  torch::nn::Linear first{16, 32}, second{32, 32}, last{32, kVocabulary};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({32})};
  at::Tensor scale;
};

std::shared_ptr<FiveLayers> make_model() {
  return drawn_from_seed(1, [] { return std::make_shared<FiveLayers>(); });
}

// On the CPU; fully_shard moves the model to the mesh's device.
std::shared_ptr<FiveLayers> make_sharded_model(const DeviceMesh& mesh) {
  auto model = make_model();
  fully_shard(*model->first, mesh);
  fully_shard(*model->second, mesh);
  fully_shard(*model->last, mesh);
  fully_shard(*model, mesh);
  return model;
}

struct Results {
  std::vector<at::Tensor> values;  // losses, then whole parameters, on CPU
  int64_t host_syncs_of_last_step = 0;
};

int64_t host_syncs(c10::Device device) {
  return device.is_cpu() ? 0 : simulated::counters_now(device).host_syncs.total;
}

Results train_rank(int64_t rank, const DeviceMesh& mesh) {
  const auto device = local_device(mesh);
  const auto model = make_sharded_model(mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto tokens = (torch::arange(6) * (3 + rank) % kVocabulary).to(device);
  const auto targets = (torch::arange(6) * (5 + rank) % kVocabulary).to(device);
  Results results;
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto before = host_syncs(device);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model->forward(tokens), targets);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
    results.host_syncs_of_last_step = host_syncs(device) - before;
  }
  for (const auto& loss : losses) results.values.push_back(loss.cpu());
  for (const auto& parameter : model->parameters())
    results.values.push_back(DTensor(parameter).full_tensor().detach().cpu());
  return results;
}

using ResultsOfRanks = std::vector<Results>;

ResultsOfRanks train_on_cpu(int64_t ranks) {
  ResultsOfRanks results(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](int64_t rank) {
    results[static_cast<size_t>(rank)] = train_rank(rank, init_device_mesh(c10::kCPU, {ranks}));
  });
  return results;
}

ResultsOfRanks train_on_devices(int64_t ranks, const std::shared_ptr<World>& world) {
  ResultsOfRanks results(static_cast<size_t>(ranks));
  simulated::run_ranks_on_devices(ranks, world, [&](int64_t rank) {
    const auto mesh = init_device_mesh(simulated::kDeviceType, {ranks});
    results[static_cast<size_t>(rank)] = train_rank(rank, mesh);
  });
  return results;
}

void expect_equal(const ResultsOfRanks& actual, const ResultsOfRanks& expected) {
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const auto& values = actual[rank].values;
    ASSERT_EQ(values.size(), expected[rank].values.size());
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(values[i].equal(expected[rank].values[i]))
          << "value " << i << " of rank " << rank;
    EXPECT_EQ(actual[rank].host_syncs_of_last_step, 0) << "rank " << rank;
  }
}

void expect_one_order(World& world, int64_t ranks) {
  const auto issued = world.issued();
  ASSERT_EQ(issued.size(), static_cast<size_t>(ranks));
  for (const auto& [rank, operations] : issued) EXPECT_EQ(operations, issued.at(0)) << rank;
}

void expect_clean(const Report& report, int64_t ranks) {
  EXPECT_THAT(report.unordered, IsEmpty());
  EXPECT_THAT(report.failures, IsEmpty());
  for (int64_t rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(report.devices[static_cast<size_t>(rank)].record_streams, 0) << rank;
}

class ShardedTraining : public ::testing::TestWithParam<int64_t> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(ShardedTraining, HasTheBitsOfCpuInEverySchedule) {
  const int64_t ranks = GetParam();
  const auto expected = train_on_cpu(ranks);
  for (const auto& schedule : simulated::schedules(kStreams)) {
    SCOPED_TRACE(to_string(schedule));
    const auto world = std::make_shared<World>();
    ResultsOfRanks results;
    const auto report = simulated::run_in({.schedule = schedule},
                                          [&] { results = train_on_devices(ranks, world); });
    expect_equal(results, expected);
    expect_one_order(*world, ranks);
    expect_clean(report, ranks);
  }
}

// That the test above can fail.
TEST_P(ShardedTraining, OverABackendWhoseWaitDoesNothingIsFound) {
  const int64_t ranks = GetParam();
  const auto world = std::make_shared<World>(World::Wait::kDoesNothing);
  const auto report =
      simulated::run_in({.schedule = simulated::kLate}, [&] { train_on_devices(ranks, world); });
  EXPECT_FALSE(report.unordered.empty());
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedTraining, ::testing::Values(2, 4));

}  // namespace
}  // namespace fsdp::testing
