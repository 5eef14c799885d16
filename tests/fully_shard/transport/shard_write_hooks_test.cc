// Every way to write shards counts as one write operator, begun before and ended after.
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/units/unit.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>

namespace fsdp::testing {
namespace {

using ShardWriteOperators = Worlds;

struct Layer {
  explicit Layer(const DeviceMesh& mesh) : linear(make_linear(4, 6)) {
    fully_shard(linear, mesh);
    before = counted();
  }
  uint64_t counted() {
    return internal::unit_of(get_fsdp_module(*linear))->group()->shards().shared()->operators();
  }
  uint64_t since() { return counted() - before; }

  torch::nn::Linear linear;
  uint64_t before;
};

TEST_P(ShardWriteOperators, OfAnEntry) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Layer layer(mesh);
    const torch::NoGradGuard no_grad;
    layer.linear->parameters()[0].fill_(0.5);
    EXPECT_EQ(layer.since(), 1);
    layer.linear->parameters()[1].mul_(2).add_(1);
    EXPECT_EQ(layer.since(), 3);
  });
}

TEST_P(ShardWriteOperators, OfAMemberWhenItGoesToTheShards) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Layer layer(mesh);
    const torch::NoGradGuard no_grad;
    layer.linear->weight.fill_(0.5);
    EXPECT_EQ(layer.since(), 0);
    get_fsdp_module(*layer.linear).reshard();
    EXPECT_EQ(layer.since(), 1);
  });
}

// Whether a rank reads its entry must not decide how often it has written.
TEST_P(ShardWriteOperators, OfAMemberThatIsReadThroughTheEntryOnOneRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Layer layer(mesh);
    const torch::NoGradGuard no_grad;
    layer.linear->weight.fill_(0.5);
    layer.linear->bias.fill_(0.5);
    if (rank == 0) {
      EXPECT_EQ((layer.linear->parameters()[0] * 2).numel(), 24);
      EXPECT_EQ((layer.linear->parameters()[1] * 2).numel(), 6);
    }
    get_fsdp_module(*layer.linear).reshard();
    EXPECT_EQ(layer.since(), 1);
    EXPECT_EQ(layer.linear->weight.sum().item<float>(), 12);
  });
}

TEST_P(ShardWriteOperators, OfAnAliasThatIsMarked) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Layer layer(mesh);
    const auto entry = layer.linear->parameters()[0];
    DTensor(entry.detach()).to_local().fill_(0.25);
    mark_shard_written(entry);
    EXPECT_EQ(layer.since(), 1);
    EXPECT_EQ(layer.linear->weight.sum().item<float>(), 6);
  });
}

INSTANTIATE_WORLDS(ShardWriteOperators, 2, 3);

}  // namespace
}  // namespace fsdp::testing
