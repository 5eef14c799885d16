// NoSyncGuard and the switches and handles of units, by what they make the runtime do.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/trio.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class NoSync : public Worlds {
 protected:
  // Units a, b, c and a root without parameters of its own.
  void on_ranks(const std::function<void(const DeviceMesh&, Trio&)>& body) const {
    Worlds::on_ranks([&](const DeviceMesh& mesh) {
      Trio model(4);
      for (auto* layer : {&model->a, &model->b, &model->c}) fully_shard(*layer, mesh);
      fully_shard(model, mesh);
      body(mesh, model);
    });
  }
  static int64_t reductions_of_a_step(const DeviceMesh& mesh, Trio& model) {
    const auto before = counters(mesh).reduce_scatters;
    model(torch::ones({2, 4})).sum().backward();
    return counters(mesh).reduce_scatters - before;
  }
};

TEST_P(NoSync, GuardsNest) {
  on_ranks([](const DeviceMesh& mesh, Trio& model) {
    const auto root = get_fsdp_module(*model);
    EXPECT_EQ(reductions_of_a_step(mesh, model), 3);
    {
      const NoSyncGuard outer(root);
      EXPECT_EQ(reductions_of_a_step(mesh, model), 0);
      {
        const NoSyncGuard inner(root);
        EXPECT_EQ(reductions_of_a_step(mesh, model), 0);
      }
      EXPECT_EQ(reductions_of_a_step(mesh, model), 0) << "the outer one lives";
    }
    EXPECT_EQ(reductions_of_a_step(mesh, model), 3);
  });
}

TEST_P(NoSync, AUnitSwitchedOffByHandStaysOff) {
  on_ranks([](const DeviceMesh& mesh, Trio& model) {
    auto b = get_fsdp_module(*model->b);
    b.set_requires_gradient_sync(false);
    EXPECT_EQ(reductions_of_a_step(mesh, model), 2);
    {
      const NoSyncGuard all(get_fsdp_module(*model));
      EXPECT_EQ(reductions_of_a_step(mesh, model), 0);
    }
    EXPECT_EQ(reductions_of_a_step(mesh, model), 2);
    b.set_requires_gradient_sync(true);
    EXPECT_EQ(reductions_of_a_step(mesh, model), 3);
  });
}

TEST_P(NoSync, AnInnerUnitAloneAndAnExceptionEndWell) {
  on_ranks([](const DeviceMesh& mesh, Trio& model) {
    try {
      const NoSyncGuard of_a(get_fsdp_module(*model->a)), of_b(get_fsdp_module(*model->b));
      EXPECT_EQ(reductions_of_a_step(mesh, model), 1);
      throw std::runtime_error("in the scope");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(reductions_of_a_step(mesh, model), 3);
  });
}

TEST_P(NoSync, AHandleThatOutlivesTheModelIsHarmless) {
  on_ranks([](const DeviceMesh& mesh, Trio&) {
    auto dying = make_linear(4, 4).ptr();
    auto unit = fully_shard(dying, mesh);
    auto handle = unit.unshard_async();
    const NoSyncGuard guard(unit);
    dying.reset();
    EXPECT_NO_THROW(handle.wait());
    EXPECT_NO_THROW(unit.reshard());
  });
}

TEST_P(NoSync, AnUnshardHandleWaitsOnce) {
  on_ranks([](const DeviceMesh& mesh, Trio& model) {
    auto unit = get_fsdp_module(*model->a);
    auto handle = unit.unshard_async();
    handle.wait();
    EXPECT_GT(resident_bytes(counters(mesh)), 0);
    unit.reshard();
    handle.wait();  // late: nothing is gathered again
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_EQ(counters(mesh).all_gathers, 1);
  });
}

TEST_P(NoSync, ForwardAtTheModuleBoundaryIsTheModulesForward) {
  on_ranks([](const DeviceMesh&, Trio& model) {
    const auto x = torch::ones({2, 4});
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(fsdp::forward(model, x), model(x)));
    EXPECT_TRUE(torch::equal(fsdp::forward(*model, x), model(x)));
  });
}

INSTANTIATE_WORLDS(NoSync, 2, 3);

}  // namespace
}  // namespace fsdp::testing
