// Units that manage no parameter: no collective is theirs, and every call on them is
// harmless.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>

namespace fsdp::testing {
namespace {

class EmptyUnits : public Worlds {};

struct Layers : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", make_linear(4, 4));
  torch::nn::Linear second = register_module("second", make_linear(4, 4));
};

TEST_P(EmptyUnits, ARootWhoseChildrenTookAllHasNoCollective) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto model = std::make_shared<Layers>();
    fully_shard(model->first, mesh);
    fully_shard(model->second, mesh);
    fully_shard(model, mesh);
    EXPECT_EQ(fsdp_modules(*model).size(), 3u);
    for (int step = 0; step < 3; ++step) {
      const auto traffic = traffic_of(mesh, [&] {
        model->forward(torch::ones({2, 4})).sum().backward();
      });
      // Backward reads the weight of `second`, which is still there.
      EXPECT_EQ(traffic.all_gathers, 2) << step;
      EXPECT_EQ(traffic.reduce_scatters, 2) << step;
      EXPECT_EQ(traffic.unused, 0) << step;
      EXPECT_EQ(resident_bytes(counters(mesh)), 0) << step;
      model->zero_grad();
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(0.5);
    }
  });
}

TEST_P(EmptyUnits, AModelWhoseParametersAreAllIgnoredHasNone) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = std::make_shared<Layers>();
    fully_shard(model, mesh, {.ignored_params = model->parameters()});
    EXPECT_TRUE(is_fsdp_module(*model));
    const auto x = torch::full({2, 4}, 1.0 + static_cast<double>(rank));
    const auto traffic = traffic_of(mesh, [&] { model->forward(x).sum().backward(); });
    EXPECT_EQ(traffic.all_gathers + traffic.reduce_scatters, 0);
    for (const auto& parameter : model->parameters()) {
      EXPECT_FALSE(is_dtensor(parameter));
      EXPECT_TRUE(parameter.grad().defined());
    }
  });
}

TEST_P(EmptyUnits, EveryCallOnOneIsHarmless) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto witness = make_linear(2, 2);
    fully_shard(witness, mesh);
    const auto model = std::make_shared<Layers>();
    auto unit = fully_shard(model, mesh, {.ignored_params = model->parameters()});
    const auto traffic = traffic_of(mesh, [&] {
      unit.unshard();
      auto handle = unit.unshard_async();
      handle.wait();
      handle.wait();
      unit.unshard_async();  // never waited for
      unit.reshard();
      unit.set_reshard_after_forward(false);
      unit.set_reshard_after_backward(false);
      unit.set_unshard_in_backward(false);
      unit.set_gradient_divide_factor(2);
      unit.set_modules_to_forward_prefetch({unit});
      unit.set_is_last_backward(false);
      unit.set_is_last_backward(true);
      unit.zero_pending_gradients();
      unit.reset_lazy_init();
      const NoSyncGuard no_sync(unit);
      const SummonFullParams full(unit);
      model->forward(torch::ones({2, 4})).sum().backward();
    });
    EXPECT_EQ(traffic.all_gathers + traffic.reduce_scatters, 0);
    EXPECT_EQ(unit.counters().all_gathers, 0);
    EXPECT_EQ(unit.name(), "");
  });
}

INSTANTIATE_WORLDS(EmptyUnits, 2, 3);

}  // namespace
}  // namespace fsdp::testing
