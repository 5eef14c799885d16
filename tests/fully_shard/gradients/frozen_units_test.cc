// Units without a trainable parameter: they take part in backward and leave nothing
// behind.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace fsdp::testing {
namespace {

class FrozenUnits : public Worlds {};

constexpr int64_t kWidth = 8;

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (const char* name : {"l0", "l1", "l2"})
      layers.push_back(register_module(name, make_linear(kWidth, kWidth)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  void freeze(size_t layer) {
    for (auto& parameter : layers[layer]->parameters()) parameter.set_requires_grad(false);
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Chain);

Chain sharded(Chain model, const DeviceMesh& mesh) {
  for (auto& layer : model->layers) fully_shard(layer, mesh);
  fully_shard(model, mesh);
  return model;
}

// Of one layer, unsharded.
int64_t layer_bytes(Chain& model, const DeviceMesh& mesh) {
  auto unit = get_fsdp_module(*model->layers[0]);
  unit.unshard();
  const auto bytes = resident_bytes(counters(mesh));
  unit.reshard();
  return bytes;
}

torch::Tensor input(bool requires_grad = false) {
  return torch::linspace(-1, 1, 2 * kWidth).view({2, kWidth}).set_requires_grad(requires_grad);
}

void expect_all_empty(const DeviceMesh& mesh) {
  const auto now = counters(mesh);
  EXPECT_EQ(resident_bytes(now), 0);
  EXPECT_EQ(now.staging_bytes, 0);
  EXPECT_EQ(now.gradient_bytes, 0);
}

TEST_P(FrozenUnits, BetweenTrainableOnesAreEmptiedInBackwardWhenTheirTurnIsOver) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Chain model;
    model->freeze(1);
    sharded(model, mesh);
    const auto one_layer = layer_bytes(model, mesh);
    for (int step = 0; step < 2; ++step) {
      auto x = input(/*requires_grad=*/true);
      int64_t at_the_input = -1;
      x.register_hook([&](const torch::Tensor&) {
        at_the_input = resident_bytes(counters(mesh));  // the first layer was the last touched
      });
      const auto loss = model(x).sum();
      const auto traffic = traffic_of(mesh, [&] { loss.backward(); });
      EXPECT_EQ(at_the_input, one_layer) << step;
      EXPECT_EQ(traffic.reduce_scatters, 2) << step;
      expect_all_empty(mesh);
      EXPECT_FALSE(model->layers[1]->parameters()[0].grad().defined());
      EXPECT_TRUE(model->layers[0]->parameters()[0].grad().defined());
    }
  });
}

TEST_P(FrozenUnits, ThatBackwardDoesNotReachAreEmptyAfterIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Chain model;
    model->freeze(0);
    model->freeze(1);
    sharded(model, mesh);
    const auto traffic = traffic_of(mesh, [&] { model(input()).sum().backward(); });
    EXPECT_EQ(traffic.reduce_scatters, 1);
    EXPECT_EQ(traffic.all_gathers, 3) << "backward reads no weight";
    expect_all_empty(mesh);
  });
}

TEST_P(FrozenUnits, AreAllEmptyAfterABackwardToTheInputAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Chain plain, model;
    for (const size_t layer : {0, 1, 2}) model->freeze(layer);
    sharded(model, mesh);
    auto expected = input(true), x = input(true);
    plain(expected).sum().backward();
    const auto traffic = traffic_of(mesh, [&] { model(x).sum().backward(); });
    EXPECT_TRUE(torch::equal(x.grad(), expected.grad()));
    EXPECT_EQ(traffic.reduce_scatters, 0);
    expect_all_empty(mesh);
  });
}

// As LibTorch, whose graph asks the leaf when the gradient arrives.
TEST_P(FrozenUnits, FrozenBetweenForwardAndBackwardGetNoGradient) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Chain plain, model;
    sharded(model, mesh);
    const auto expected = plain(input()).sum(), loss = model(input()).sum();
    for (const size_t layer : {0, 1}) {
      plain->freeze(layer);
      model->freeze(layer);
    }
    expected.backward();
    loss.backward();
    const auto entries = model->parameters(), parameters = plain->parameters();
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_EQ(entries[i].grad().defined(), parameters[i].grad().defined()) << i;
      if (!entries[i].grad().defined()) continue;
      EXPECT_TRUE(torch::allclose(full_gradient(entries[i]), parameters[i].grad())) << i;
    }
    expect_all_empty(mesh);
  });
}

INSTANTIATE_WORLDS(FrozenUnits, 2, 3);

}  // namespace
}  // namespace fsdp::testing
