// Meshes, groups and modules on a device that is neither the CPU nor CUDA.
#include "device_mesh/device_mesh.h"

#include "device_mesh/all_reduce.h"
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/internal/accelerator.h"
#include "device_mesh/process_group.h"
#include "device_mesh/process_groups/backend_table.h"
#include "device_mesh/process_groups/process_group_factory.h"
#include "fully_shard/fully_shard.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/on_another_thread.h"

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/nn.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace fsdp::testing {
namespace {

using simulated::kDeviceType;
using simulated::World;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class MeshOnAccelerator : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

// A rank for each device, in the schedule that runs everything late.
void on_devices(int64_t ranks, const std::function<void(int64_t rank)>& body) {
  simulated::run_in({.schedule = simulated::kLate}, [&] {
    simulated::run_ranks_on_devices(ranks, std::make_shared<World>(), body);
  });
}

// Those that gathers and reductions need, and none besides, before anything is issued.
TEST_F(MeshOnAccelerator, ConnectsTheGroupsOfUnitsOnceAndInOneOrder) {
  const auto world = std::make_shared<World>();
  simulated::run_in({.schedule = simulated::kLate}, [&] {
    simulated::run_ranks_on_devices(4, world, [](int64_t) {
      const auto mesh = init_device_mesh(kDeviceType, {2, 2}, {"replicate", "shard"});
      for (int unit = 0; unit < 2; ++unit) {
        torch::nn::Linear layer(4, 4);
        fully_shard(layer, mesh);
      }
    });
  });
  const auto connections = world->connections();
  ASSERT_EQ(connections.size(), 4u);
  for (const auto& [rank, groups] : connections) {
    EXPECT_EQ(groups, connections.at(0)) << rank;
    EXPECT_THAT(groups, ElementsAre(EndsWith("shard"), HasSubstr("shard/reduce"),
                                    HasSubstr("replicate/reduce")));
  }
}

TEST_F(MeshOnAccelerator, KeepsItsDeviceOnThreadsWithoutAGuard) {
  on_devices(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(kDeviceType, {2, 1}, {"dp", "tp"});
    const auto device = simulated::device(rank);
    on_another_thread([&] {
      EXPECT_EQ(internal::current_device(kDeviceType), simulated::device(0));
      EXPECT_EQ(local_device(mesh), device);
      EXPECT_EQ(local_device(mesh["dp"]), device);
      EXPECT_EQ(local_device(mesh["dp"].beside(mesh["tp"])), device);
      EXPECT_EQ(local_device(mesh.flatten({"dp", "tp"})["dp_tp"]), device);
      EXPECT_EQ(local_device(mesh.neighbours(0, 1)), device);
    });
  });
}

TEST_F(MeshOnAccelerator, ReducesAndWaitsOnItsDeviceFromAThreadWithoutAGuard) {
  on_devices(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(kDeviceType, {2});
    on_another_thread([&] {
      EXPECT_EQ(all_reduce(rank + 1, mesh), 3);
      barrier(mesh);
    });
  });
}

TEST_F(MeshOnAccelerator, OfSeveralDimensionsMakesGroupsAndSideGroupsThroughTheTable) {
  on_devices(4, [](int64_t) {
    const auto mesh = init_device_mesh(kDeviceType, {2, 2}, {"dp", "tp"});
    const auto& world = default_process_group();
    for (const auto& group : {mesh.group(0), mesh.group(1), mesh.side_group(0, "reduce")}) {
      EXPECT_THAT(internal::group_backend(group), StartsWith("simulated "));
      EXPECT_EQ(internal::group_backend(group), internal::group_backend(world));
      EXPECT_TRUE(internal::has_gloo(group));
      EXPECT_EQ(group->getSize(), 2);
    }
    EXPECT_EQ(internal::global_ranks(mesh.group(1)), mesh["tp"].ranks());
  });
}

TEST_F(MeshOnAccelerator, IsTheDefaultOneAndServesTheCpuToo) {
  on_devices(2, [](int64_t rank) {
    const auto mesh = default_mesh();
    EXPECT_EQ(local_device(mesh), simulated::device(rank));
    EXPECT_TRUE(local_device(init_device_mesh(c10::kCPU, {2})).is_cpu());
  });
}

TEST_F(MeshOnAccelerator, OfTheFakeBackendServesIt) {
  init_process_group({.backend = "fake", .rank = 1, .world_size = 4});
  EXPECT_EQ(local_device(init_device_mesh(kDeviceType, {4})), simulated::device(0));
  destroy_process_group();
}

TEST_F(MeshOnAccelerator, IsOfTheDeviceThatTheLocalRankSelects) {
  const c10::DeviceGuard guard(simulated::device(0));  // puts back what is selected below
  const auto backend = simulated::backend_of(std::make_shared<World>());
  const std::map<std::string, std::string> place = {
      {"RANK", "2"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "2"}};
  for (const auto& [name, value] : place) setenv(name.c_str(), value.c_str(), /*replace=*/1);
  init_process_group({.backend = backend, .rank = 0, .world_size = 1});
  for (const auto& [name, value] : place) unsetenv(name.c_str());
  EXPECT_EQ(local_device(default_mesh()), simulated::device(2));
  destroy_process_group();
}

TEST_F(MeshOnAccelerator, HasABackendThatIsPreferredWhereNoneIsNamed) {
  simulated::backend_of(std::make_shared<World>());
  EXPECT_THAT(internal::preferred_backend(), StartsWith("simulated "));
}

TEST_F(MeshOnAccelerator, TakesBuffersOfACpuModelAlongInPlace) {
  on_devices(2, [](int64_t rank) {
    torch::nn::BatchNorm1d norm(4);
    const auto mean = norm->running_mean;
    fully_shard(*norm, init_device_mesh(kDeviceType, {2}));
    for (const auto& buffer : norm->buffers()) EXPECT_EQ(buffer.device(), simulated::device(rank));
    EXPECT_EQ(mean.device(), simulated::device(rank));
    EXPECT_TRUE(mean.is_same(norm->running_mean));
    EXPECT_TRUE(norm->running_var.cpu().equal(torch::ones({4})));
  });
}

}  // namespace
}  // namespace fsdp::testing
