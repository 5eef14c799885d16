// Whole values of a model's tensors: how many collectives bring them, and what they are.
#include "checkpoint/plan/whole_values.h"

#include "checkpoint/checkpoint.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/process_group.h"
#include "fully_shard/summon_full_params.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace fsdp::testing {
namespace {

using internal::checkpoint::default_world;
using internal::checkpoint::NamedTensor;
using internal::checkpoint::WholeValues;

constexpr int64_t kBlocks = 3;

// A unit for each block, and the root's.
struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    scale = register_parameter("scale", torch::rand({5}));
    for (int64_t i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(5, 5)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = torch::tanh(block(x));
    return x * scale;
  }
  std::vector<torch::nn::Linear> blocks;
  torch::Tensor scale;
};
TORCH_MODULE(Blocks);

void shard_blocks(Blocks& model, int64_t world) {
  for (auto& parameter : model->parameters()) torch::nn::init::constant_(parameter, 0.1);
  const auto mesh = init_device_mesh(torch::kCPU, {world});
  for (auto& block : model->blocks) fully_shard(block, mesh);
  fully_shard(model, mesh);
}

uint64_t sent_by(const std::function<void()>& body) {
  const auto& group = default_process_group();
  const uint64_t before = group->getSequenceNumberForGroup();
  body();
  return group->getSequenceNumberForGroup() - before;
}

TEST(Gathering, AUnitOfAFullSaveIsOneCollectiveAsItIsInTraining) {
  const WithEnvironment c10d_counts("FSDP_PEER_MEMORY", "off");
  for (const int64_t world : {2, 3}) {
    TemporaryFolder folder;
    run_ranks(world, [&](int64_t) {
      Blocks model;
      shard_blocks(model, world);
      torch::optim::AdamW optimizer(model->parameters());
      model->forward(torch::ones({2, 5})).sum().backward();
      optimizer.step();
      constexpr uint64_t kUnits = kBlocks + 1;
      // Messages to and from every other rank: an announcement, which brings the unit's
      // parts, and in the exchanges of a save their texts.
      const auto messages = 2 * static_cast<uint64_t>(world - 1);
      const uint64_t exchanges = 3 * messages;
      const uint64_t units = kUnits * messages;
      const auto visit = [](const std::string&, const at::Tensor&) {};
      EXPECT_EQ(sent_by([&] { for_each_full_param(*model, visit); }), units);
      const SaveOptions full{.layout = Layout::kFull};
      EXPECT_EQ(sent_by([&] { save({.model = model}, folder / "model", full); }),
                exchanges + units);
      // The state's tensors go with their parameters' units, and the step counts
      // together, by a broadcast behind its announcement.
      EXPECT_EQ(
          sent_by([&] { save({.model = model, .optimizer = optimizer}, folder / "both", full); }),
          exchanges + 2 * units + messages + 1);
      EXPECT_EQ(sent_by([&] { get_model_state_dict(*model, {.full_state_dict = true}); }), units);
    });
  }
}

// Tensors of one unit of every dtype that files hold, cut along dimensions 0 and 1.
TEST(Gathering, TogetherTheyAreWhatTheyAreAlone) {
  const WithEnvironment c10d_counts("FSDP_PEER_MEMORY", "off");
  const std::vector<torch::ScalarType> dtypes = {
      torch::kDouble, torch::kFloat, torch::kBFloat16,     torch::kLong,
      torch::kByte,   torch::kBool,  torch::kComplexFloat, torch::kFloat8_e4m3fn};
  for (const int64_t world : {2, 3, 4}) {
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      const int unit = 0;
      std::vector<NamedTensor> tensors;
      std::vector<at::Tensor> expected;
      for (const auto dtype : dtypes) {
        for (const int64_t dim : {0, 1}) {
          const auto whole = torch::arange(35).remainder(7).view({7, 5}).to(dtype);
          expected.push_back(whole);
          const auto name = std::to_string(tensors.size());
          tensors.push_back({name, distribute_tensor(whole, mesh, {Shard{dim}}), &unit});
        }
      }
      tensors.push_back({"empty", distribute_tensor(torch::ones({0, 3}), mesh, {Shard{0}}), &unit});
      expected.push_back(torch::ones({0, 3}));
      WholeValues values(tensors, default_world());
      const auto announced = 2 * static_cast<uint64_t>(world - 1);
      EXPECT_EQ(sent_by([&] { EXPECT_TRUE(torch::equal(values.next(), expected[0])); }), announced);
      EXPECT_EQ(sent_by([&] {
                  for (size_t i = 1; i < expected.size(); ++i) {
                    const at::Tensor value = values.next();
                    ASSERT_EQ(value.scalar_type(), expected[i].scalar_type());
                    EXPECT_TRUE(torch::equal(value.to(torch::kComplexDouble),
                                             expected[i].to(torch::kComplexDouble)))
                        << i;
                  }
                }),
                0u);
    });
  }
}

// Replicas of a 2-D mesh gather along the dimension that cuts, and only there.
TEST(Gathering, OfAHybridMeshStaysWithinTheRanksThatCut) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    const int unit = 0;
    const auto whole = torch::arange(21).view({7, 3});
    const auto tensor = distribute_tensor(whole, mesh, {Replicate{}, Shard{0}});
    WholeValues values({{"a", tensor, &unit}, {"b", tensor, &unit}}, default_world());
    EXPECT_EQ(sent_by([&] {
                EXPECT_TRUE(torch::equal(values.next(), whole)) << rank;
                EXPECT_TRUE(torch::equal(values.next(), whole)) << rank;
              }),
              0u);  // nothing over all ranks
  });
}

}  // namespace
}  // namespace fsdp::testing
