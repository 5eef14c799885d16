// Several modules as one unit: they travel together.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class SeveralModules : public Worlds {};

struct TrioImpl : torch::nn::Module {
  torch::nn::Linear a = register_module("a", make_linear(4, 4)),
                    b = register_module("b", make_linear(4, 4)),
                    c = register_module("c", make_linear(4, 4));
};
TORCH_MODULE(Trio);

// a and b are one unit, c another.
Trio pair_and_single(const DeviceMesh& mesh) {
  Trio model;
  fully_shard({model->a.get(), model->b.get()}, mesh);
  fully_shard(model->c, mesh);
  fully_shard(model, mesh);
  return model;
}

TEST_P(SeveralModules, AreGatheredAndReducedTogether) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = pair_and_single(mesh);
    for (int step = 0; step < 2; ++step) {
      torch::Tensor loss;
      const auto forward = traffic_of(mesh, [&] {
        loss = model->c(torch::tanh(model->b(torch::tanh(model->a(torch::ones({2, 4})))))).sum();
      });
      EXPECT_EQ(forward.all_gathers, 2) << step;
      const auto backward = traffic_of(mesh, [&] { loss.backward(); });
      EXPECT_EQ(backward.all_gathers, 1) << step << ": c is there";
      EXPECT_EQ(backward.reduce_scatters, 2) << step;
      EXPECT_EQ(resident_bytes(counters(mesh)), 0) << step;
      model->zero_grad();
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(0.5);
    }
  });
}

TEST_P(SeveralModules, OfWhichOneRunsHaveGradientsForThatOneOnly) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = pair_and_single(mesh);
    const auto traffic = traffic_of(mesh, [&] { model->b(torch::ones({1, 4})).sum().backward(); });
    EXPECT_EQ(traffic.all_gathers - traffic.prefetched, 1);
    EXPECT_EQ(traffic.reduce_scatters, 1);
    EXPECT_FALSE(model->a->parameters()[0].grad().defined());
    EXPECT_TRUE(torch::equal(full_gradient(model->b->parameters()[0]), torch::ones({4, 4})));
  });
}

TEST_P(SeveralModules, MayBeTheOutermostUnit) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto a = make_linear(4, 4), b = make_linear(4, 4);
    const auto unit = fully_shard({a.get(), b.get()}, mesh);
    EXPECT_TRUE(unit.is_root());
    EXPECT_EQ(get_fsdp_module(*a), get_fsdp_module(*b));
    const auto traffic = traffic_of(mesh, [&] {
      b(torch::tanh(a(torch::ones({2, 4})))).sum().backward();
    });
    EXPECT_EQ(traffic.all_gathers, 1);
    EXPECT_EQ(traffic.reduce_scatters, 1);
  });
}

TEST_P(SeveralModules, ThatAreGoneHaveNoParametersThere) {
  run_ranks(world(), [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {world()});
    auto stays = make_linear(4, 4), goes = make_linear(4, 4);
    const auto unit = fully_shard({stays.get(), goes.get()}, mesh);
    const auto all = unit.parameters().size();
    goes = torch::nn::Linear(nullptr);
    const auto left = unit.parameters();
    EXPECT_EQ(left.size(), all / 2);
    for (const auto& entry : left) EXPECT_TRUE(entry.defined());
  });
}

INSTANTIATE_WORLDS(SeveralModules, 2, 3);

}  // namespace
}  // namespace fsdp::testing
