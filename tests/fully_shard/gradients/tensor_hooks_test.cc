// Tensor hooks on members and on registry entries.
#include "tests/fully_shard/support/constant_layer.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class Hooks : public Worlds {};

double mean_of_ones_to(int64_t world) { return static_cast<double>(world + 1) / 2; }

// The gradient of the weight is 1 + rank everywhere, its mean (world + 1) / 2.
torch::Tensor loss_of(torch::nn::Linear& layer, int64_t rank) {
  return layer(torch::full({1, 4}, 1.0 + static_cast<double>(rank))).sum();
}

void train_with_member_hook(torch::nn::Linear& layer, int64_t rank, const DeviceMesh& mesh,
                            const int& calls) {
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  const auto expected = torch::full({4, 4}, 2 * mean_of_ones_to(mesh.size()));
  for (int step = 0; step < 4; ++step) {
    loss_of(layer, rank).backward();
    EXPECT_EQ(calls, step + 1);
    EXPECT_TRUE(torch::allclose(full_gradient(layer->parameters()[0]), expected)) << step;
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST_P(Hooks, OnAMemberMadeAfterFullyShardChangeEveryStepsGradient) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(4);
    fully_shard(layer, mesh);
    int calls = 0;
    layer->weight.register_hook([&calls](const torch::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    train_with_member_hook(layer, rank, mesh, calls);
  });
}

TEST_P(Hooks, OnAMemberMadeBeforeFullyShardChangeEveryStepsGradient) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(4);
    int calls = 0;
    layer->weight.register_hook([&calls](const torch::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    fully_shard(layer, mesh);
    train_with_member_hook(layer, rank, mesh, calls);
  });
}

TEST_P(Hooks, OnAMemberMadeBetweenStepsAndRemovedAgain) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(4);
    fully_shard(layer, mesh);
    const auto gradient = [&] {
      layer->zero_grad();
      loss_of(layer, rank).backward();
      return full_gradient(layer->parameters()[0]);
    };
    const auto plain = gradient();
    const auto hook = layer->weight.register_hook([](const torch::Tensor& g) { return g * 3; });
    EXPECT_TRUE(torch::equal(gradient(), 3 * plain));
    layer->weight.remove_hook(hook);
    EXPECT_TRUE(torch::equal(gradient(), plain));
  });
}

TEST_P(Hooks, OnAnEntryGetTheReducedGradientOncePerReductionAndMayReplaceIt) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(4);
    fully_shard(layer, mesh);
    std::vector<torch::Tensor> seen;
    layer->parameters()[0].register_hook([&seen](const torch::Tensor& gradient) {
      seen.push_back(gradient.clone());
      return gradient * 2;
    });
    const auto mean = torch::full({4, 4}, mean_of_ones_to(world()));
    for (size_t backward = 1; backward <= 3; ++backward) {  // accumulates in .grad
      loss_of(layer, rank).backward();
      ASSERT_EQ(seen.size(), backward);
      ASSERT_TRUE(is_dtensor(seen.back()));
      EXPECT_TRUE(torch::allclose(full_value(seen.back()), mean));
      EXPECT_TRUE(torch::allclose(full_gradient(layer->parameters()[0]),
                                  2 * static_cast<double>(backward) * mean));
    }
    layer->zero_grad();
    {
      NoSyncGuard no_sync(get_fsdp_module(*layer));
      loss_of(layer, rank).backward();
      EXPECT_EQ(seen.size(), 3u);
    }
    loss_of(layer, rank).backward();
    ASSERT_EQ(seen.size(), 4u);
    EXPECT_TRUE(torch::allclose(full_value(seen.back()), 2 * mean));
    EXPECT_TRUE(torch::allclose(full_gradient(layer->parameters()[0]), 4 * mean));
  });
}

TEST_P(Hooks, OnAnEntryThatReturnAPlainTensorAreAnErrorByName) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(4);
    fully_shard(layer, mesh);
    layer->parameters()[0].register_hook([](const torch::Tensor&) { return torch::zeros({4, 4}); });
    EXPECT_THAT(message_of([&] { loss_of(layer, rank).backward(); }), HasSubstr("'weight'"));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

INSTANTIATE_WORLDS(Hooks, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
