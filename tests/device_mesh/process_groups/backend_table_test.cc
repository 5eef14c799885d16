#include "device_mesh/process_groups/backend_table.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/accelerator.h"
#include "device_mesh/process_group.h"
#include "device_mesh/process_groups/process_group_factory.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_over;
using ::testing::StartsWith;

constexpr const char* kName = "without devices";

// For a type of which there are no devices; counts how often pending works are waited
// for.
class WithoutDevices final : public c10d::Backend {
 public:
  explicit WithoutDevices(const GroupMember& member)
      : Backend(member.rank, member.size),
        options_(c10::make_intrusive<Options>(kName, member.timeout)) {
    options_->global_ranks_in_group = member.global_ranks;
  }
  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void waitForPendingWorks() override { ++waits; }

  static inline std::atomic<int> waits = 0;

 private:
  c10::intrusive_ptr<Options> options_;
};

class Unknown final : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "unknown"; }
};

void add_once(const std::string& name, BackendEntry entry) {
  if (find_backend(name) == nullptr) add_backend(name, std::move(entry));
}

void add_without_devices() {
  const auto make = [](const GroupMember& member) {
    return c10::make_intrusive<WithoutDevices>(member);
  };
  add_once(kName, {.device_types = {c10::kMTIA}, .make = make});
}

TEST(BackendTable, HasThreeBackendsFromTheStart) {
  const auto *const gloo = find_backend("gloo"), *const nccl = find_backend("nccl"),
                    *const fake = find_backend("fake");
  ASSERT_TRUE(gloo && nccl && fake);
  EXPECT_TRUE(gloo->serves(c10::kCPU) && !gloo->serves(c10::kCUDA));
  EXPECT_TRUE(nccl->serves(c10::kCPU) && nccl->serves(c10::kCUDA) && !nccl->serves(c10::kXPU));
  EXPECT_TRUE(fake->serves(c10::kCPU) && !fake->has_gloo);
  for (const auto type : accelerator_types()) EXPECT_TRUE(fake->serves(type)) << type;
  EXPECT_EQ(find_backend("smoke"), nullptr);
  EXPECT_THAT(names_of_backends(), StartsWith("'gloo', 'nccl'"));
}

TEST(BackendTable, RefusesANameThatIsTaken) {
  EXPECT_THAT(message_of<c10::ValueError>([] { add_backend("gloo", {}); }),
              AllOf(HasSubstr("'gloo' is taken"), HasSubstr("'nccl'")));
}

TEST(BackendTable, IsAskedForTheBackendOfADeviceType) {
  EXPECT_EQ(backend_for(c10::kCPU), "gloo");
  EXPECT_EQ(backend_for(c10::kMeta), "gloo");  // never the fake one, which talks to nobody
}

TEST(BackendTable, GivesGroupsAndSideGroupsOfABackendThatIsAdded) {
  add_without_devices();
  EXPECT_EQ(backend_for(c10::kMTIA), kName);
  EXPECT_THAT(names_of_backends(), HasSubstr(kName));
  WithoutDevices::waits = 0;
  run_ranks_over(kName, 2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto alone = mesh.neighbours(0, 1);
    for (const auto& group : {mesh.group(), alone.group(), mesh.side_group(0, "reduce")}) {
      EXPECT_EQ(group_backend(group), kName);
      EXPECT_TRUE(has_gloo(group));
    }
    EXPECT_EQ(global_ranks(alone.group()), std::vector<int64_t>{rank});
    auto sum = at::ones({1});
    all_reduce(mesh.group(), sum, ReduceOp::kSum).wait("all-reduce");
    EXPECT_EQ(sum.item<float>(), 2);
    const auto mesh_there = init_device_mesh(c10::kMTIA, {2});
    EXPECT_EQ(local_device(mesh_there), c10::Device(c10::kMTIA));  // of which none are here
  });
  EXPECT_EQ(WithoutDevices::waits, 2 * 2);  // the world and its side group
}

TEST(BackendTable, SaysThatNoDeviceIsVisibleToTheLocalRank) {
  add_without_devices();
  const auto text = message_of<c10::ValueError>([] { init_process_group({.backend = kName}); });
  EXPECT_EQ(text, "backend 'without devices': no MTIA device is visible to local rank 0");
}

TEST(BackendTable, SaysWhichOnesThereAreWhereThisBuildLacksOne) {
  add_once("lacking", {.device_types = {c10::kVE}});
  const auto text = message_of<c10::NotImplementedError>([] {
    GroupRequest request;
    request.backend = "lacking";
    make_world_group(request);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("backend 'lacking': this build does not have it"),
                          HasSubstr("'gloo', 'nccl'"), HasSubstr("(rank 0)")));
}

TEST(BackendTable, IsWhatMakersOfSubgroupsAreToldOf) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(nullptr, 0, 1);
  group->setBackend(c10::kMTIA, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<Unknown>(0, 1));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  EXPECT_FALSE(has_gloo(group));
  EXPECT_EQ(global_ranks(group), std::vector<int64_t>{0});
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { make_subgroup(group, {0}, "side"); }),
              AllOf(HasSubstr("a group of backend 'unknown' cannot make further groups"),
                    HasSubstr("'gloo', 'nccl'")));
}

TEST(DeviceMesh, RefusesTypesThatAreNotAccelerators) {
  run_ranks(1, [](int64_t) {
    EXPECT_THAT(
        message_of<c10::ValueError>([] { static_cast<void>(init_device_mesh(c10::kMeta, {1})); }),
        HasSubstr("device_type meta: allowed are cpu and accelerators, such as cuda (rank 0)"));
  });
}

}  // namespace
}  // namespace fsdp::internal
