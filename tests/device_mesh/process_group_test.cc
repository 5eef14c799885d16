#include "device_mesh/process_group.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_groups/dimension_groups.h"
#include "tests/support/errors.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thread_ranks.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fsdp {
namespace {

using testing::ChildCase;
using ::testing::HasSubstr;
using testing::run_processes;

int64_t sum_of_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto total = at::full({1}, internal::group_rank(group), at::kLong);
  internal::all_reduce(group, total, internal::ReduceOp::kSum).wait("sum of ranks");
  return total.item<int64_t>();
}

const ChildCase kMeetsTheOthers("meets_the_others", [] {
  const auto mesh = init_device_mesh(c10::kCPU, {3});
  std::printf("rank %lld sum %lld\n", static_cast<long long>(mesh.rank()),
              static_cast<long long>(sum_of_ranks(mesh.group())));
  destroy_process_group();
  init_process_group({.backend = "gloo"});  // the default group can be made again
  const bool same = sum_of_ranks(default_process_group()) == 3;
  destroy_process_group();
  return same ? 0 : 3;
});

const ChildCase kHasManyThreads("has_many_threads", [] {
  unsetenv("OMP_NUM_THREADS");
  at::set_num_threads(static_cast<int>(std::thread::hardware_concurrency()) + 1);
  init_process_group({.backend = "gloo"});
  destroy_process_group();
  return 0;
});

const ChildCase kLastRankDies("last_rank_dies", [] {
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(10)});
  const auto group = default_process_group();
  internal::barrier(group);
  if (internal::group_rank(group) == 1) std::_Exit(42);
  sum_of_ranks(group);
  return 0;
});

const ChildCase kLastRankIsLate("last_rank_is_late", [] {
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(1)});
  const auto group = default_process_group();
  internal::barrier(group);
  if (internal::group_rank(group) == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
  sum_of_ranks(group);
  return 0;
});

TEST(ProcessGroup, ProcessesMeetThroughTheEnvironment) {
  const auto ends = run_processes("meets_the_others", 3, std::chrono::seconds(40));
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].exit_code, 0) << ends[rank].output;
    EXPECT_EQ(ends[rank].output, "rank " + std::to_string(rank) + " sum 3\n");
  }
}

TEST(ProcessGroup, TheFirstRankOfAHostWarnsOfMoreThreadsThanCores) {
  const auto ends = run_processes("has_many_threads", 2, std::chrono::seconds(40));
  EXPECT_THAT(ends[0].output, HasSubstr("2 ranks on host "));
  EXPECT_THAT(ends[0].output, HasSubstr("OMP_NUM_THREADS="));
  EXPECT_EQ(ends[1].output, "");
}

TEST(ProcessGroup, DeadRankEndsTheOthersAtOnce) {
  const auto ends = run_processes("last_rank_dies", 2, std::chrono::seconds(20));
  EXPECT_EQ(ends[1].exit_code, 42);
  EXPECT_EQ(ends[0].exit_code, 1) << ends[0].output;
  EXPECT_NE(
      ends[0].output.find("sum of ranks failed on rank 0 in group 'world' of ranks 0, 1 (gloo): "
                          "a rank has ended, or the link to it is down: "),
      std::string::npos)
      << ends[0].output;
}

TEST(ProcessGroup, LateRankIsATimeout) {
  const auto ends = run_processes("last_rank_is_late", 2, std::chrono::seconds(20));
  EXPECT_EQ(ends[0].exit_code, 1) << ends[0].output;
  EXPECT_NE(ends[0].output.find("sum of ranks failed on rank 0"), std::string::npos)
      << ends[0].output;
  EXPECT_NE(ends[0].output.find("No word from rank 1"), std::string::npos) << ends[0].output;
  EXPECT_FALSE(ends[0].killed_at_deadline);
}

TEST(ProcessGroup, WorldWithoutMasterAddressIsAnError) {
  EXPECT_NE(testing::message_of<c10::ValueError>([] {
              init_process_group({.backend = "gloo", .rank = 1, .world_size = 2});
            }).find("environment variable MASTER_ADDR is not set: a world of 2 ranks needs"),
            std::string::npos);
}

TEST(ProcessGroup, AWorldOfOneNeedsNothing) {
  EXPECT_FALSE(is_process_group_initialized());
  init_process_group();
  EXPECT_TRUE(is_process_group_initialized());
  EXPECT_EQ(internal::group_size(default_process_group()), 1);
  EXPECT_EQ(sum_of_ranks(default_process_group()), 0);
  EXPECT_NE(testing::message_of<c10::ValueError>([] {
              init_process_group();
            }).find("has a default group already (rank 0)"),
            std::string::npos);
  destroy_process_group();
  EXPECT_FALSE(is_process_group_initialized());
  EXPECT_NE(testing::message_of<c10::ValueError>([] {
              default_process_group();
            }).find("call fsdp::init_process_group() first"),
            std::string::npos);
}

TEST(ProcessGroup, ThreadsHaveTheirOwnDefaultGroup) {
  testing::run_ranks(3, [](int64_t rank) {
    EXPECT_EQ(internal::group_rank(default_process_group()), rank);
    EXPECT_EQ(sum_of_ranks(default_process_group()), 3);
    EXPECT_NE(testing::message_of<c10::ValueError>([] {
                init_process_group(
                    {.store = c10::make_intrusive<c10d::HashStore>(), .rank = 0, .world_size = 1});
              }).find("this thread has a default group already"),
              std::string::npos);
  });
  EXPECT_FALSE(is_process_group_initialized());
}

TEST(ProcessGroup, OneStoreServesSeveralGroupsInTurn) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        init_process_group({.backend = "gloo", .store = store, .rank = rank, .world_size = 2});
        EXPECT_EQ(sum_of_ranks(default_process_group()), 1);
        destroy_process_group();
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

// The other rank has left and will not meet this one.
TEST(ProcessGroup, EndsWellThoughAFurtherGroupCouldNotBeMade) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(std::chrono::seconds(1));
  std::barrier both_joined(2);
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      init_process_group({.backend = "gloo",
                          .store = store,
                          .rank = rank,
                          .world_size = 2,
                          .timeout = std::chrono::seconds(1)});
      both_joined.arrive_and_wait();
      if (rank == 0) {
        EXPECT_ANY_THROW(internal::default_dimension()->side_group("alone"));
      }
      EXPECT_NO_THROW(destroy_process_group());
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(ProcessGroup, BadOptionsNameTheirValue) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = [&](ProcessGroupOptions options) {
    return testing::message_of<c10::ValueError>([&] { init_process_group(options); });
  };
  EXPECT_EQ(error({.store = store}),
            "ProcessGroupOptions: rank and world_size are required with a store");
  EXPECT_EQ(error({.store = store, .rank = 2, .world_size = 2}),
            "ProcessGroupOptions: rank=2: expected 0 to 1 (world_size=2)");
  EXPECT_EQ(error({.store = store, .rank = 0}),
            "ProcessGroupOptions: world_size=-1: expected at least 1 (rank=0)");
  EXPECT_EQ(error({.backend = "smoke", .store = store, .rank = 0, .world_size = 1}),
            "backend 'smoke': allowed are 'gloo', 'nccl' and 'fake' (rank 0)");
}

TEST(RunRanks, RethrowsTheFirstErrorWithItsRank) {
  try {
    testing::run_ranks(3, [](int64_t rank) {
      if (rank == 1) throw std::runtime_error("broken on purpose");
      sum_of_ranks(default_process_group());
    });
    FAIL() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "rank 1: broken on purpose");
  }
}

// Threads of this process that give way to others when they wake up.
int64_t batch_threads() {
  int64_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    count += sched_getscheduler(std::stoi(task.path().filename())) == SCHED_BATCH;
  return count;
}

TEST(ProcessGroup, TheTransportsThreadGivesWayAndTheCallersOwnPolicyStays) {
  const auto before = batch_threads();
  testing::run_ranks(1, [&](int64_t) {
    EXPECT_EQ(batch_threads(), before + 1);
    EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
  });
}

}  // namespace
}  // namespace fsdp
