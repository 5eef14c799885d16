// Every layer type of torch::nn trains sharded with the unsharded numbers, with every
// group emptied and poisoned after every operator.
#include "tests/fully_shard/support/module_zoo.h"

#include "on_demand/on_demand_storage.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class ModuleZoo : public Worlds {
 protected:
  void SetUp() override { internal::set_evict_after_every_operator(true); }
  void TearDown() override { internal::set_evict_after_every_operator(false); }
};

TEST_P(ModuleZoo, EveryLayerHasTheUnshardedNumbers) {
  for (const auto& zoo_case : zoo_cases()) {
    SCOPED_TRACE(zoo_case.name);
    expect_parity(world(), zoo_case.build, shard_whole, zoo_case.name);
  }
}

TEST_P(ModuleZoo, ParametersAreEmptyBetweenForwardAndBackward) {
  on_ranks([&](const DeviceMesh& mesh) {
    for (const auto& zoo_case : zoo_cases()) {
      const auto model = build_seeded(zoo_case.build);
      fully_shard(*model.module, mesh);
      const auto before = counters(mesh).reshards;
      const auto loss = model.loss(make_data(3));
      const auto resharded = counters(mesh).reshards - before;
      EXPECT_EQ(resharded > 0, world() > 1) << zoo_case.name;
      EXPECT_EQ(resident_bytes(counters(mesh)), 0) << zoo_case.name;
      loss.backward();
    }
  });
}

INSTANTIATE_WORLDS(ModuleZoo, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
