// Ranks that wait for one another in different groups are told so within seconds; ranks
// that are only late never are.
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/watched_rank.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using Milliseconds = std::chrono::milliseconds;

// Waits are told soon, so that what is wrong shows soon, and what is only late often.
class WatchedWaits : public ::testing::Test {
 protected:
  void SetUp() override { set_wait_patience(Milliseconds(40), Milliseconds(10)); }
  void TearDown() override { set_wait_patience(Milliseconds(400), Milliseconds(100)); }
};

std::string error_text_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void gather(const Collectives& collectives, const std::string& what) {
  collectives.rows_of_ranks({.row = at::full({2}, 1.0f), .what = what});
}

Collectives reductions_of(const DeviceMesh& mesh) {
  return collectives_of(mesh, 0).beside(mesh.side_group(0, "beside"));
}

TEST_F(WatchedWaits, AGatherAgainstAReductionIsAnErrorOnAllRanksThatNamesBoth) {
  for (const int64_t world : {2, 3}) {
    run_ranks(world, [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const auto gathers = collectives_of(mesh, 0), reductions = reductions_of(mesh);
      gather(gathers, "first gather");
      const auto begin = std::chrono::steady_clock::now();
      const auto error = error_text_of([&] {
        rank == 0 ? gather(gathers, "norm of unit 'l0'") : gather(reductions, "first reduction");
      });
      EXPECT_THAT(error, AllOf(HasSubstr("out of order"),
                               HasSubstr("rank 0 waits in the norm of unit 'l0' (operation 3"),
                               HasSubstr("waits in the first reduction (operation 1")))
          << "rank " << rank;
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
      for (const auto& each : {gathers, reductions}) {
        EXPECT_THAT(error_text_of([&] { gather(each, "later gather"); }),
                    AllOf(HasSubstr("the later gather can not go on"), HasSubstr("norm of unit")));
      }
    });
  }
}

TEST_F(WatchedWaits, SoAreGroupsOfDifferentDimensions) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto world = Collectives::of(default_process_group(), c10::kCPU);
    gather(collectives_of(mesh, 1), "tp");
    const auto error = error_text_of([&] {
      // Ranks 1 and 3 wait for 0 and 2, which wait for all.
      rank % 2 == 0 ? gather(world, "clipping") : gather(collectives_of(mesh, 1), "next layer");
    });
    EXPECT_THAT(error, AllOf(HasSubstr("clipping"), HasSubstr("next layer"))) << "rank " << rank;
  });
}

TEST_F(WatchedWaits, WhoComesLateIsWaitedForAndNothingIsLeftInTheStore) {
  run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto gathers = collectives_of(mesh, 0), reductions = reductions_of(mesh);
    for (int64_t late = 0; late < 3; ++late) {
      if (rank == late) std::this_thread::sleep_for(Milliseconds(400));
      gather(late == 1 ? reductions : gathers, "gather");
    }
    const auto store = default_process_group()->getStore();
    const auto is_told = [&] { return store->check({"waits/" + std::to_string(rank)}); };
    for (int tries = 0; is_told() && tries < 500; ++tries)
      std::this_thread::sleep_for(Milliseconds(10));
    EXPECT_FALSE(is_told());
  });
}

// A thread that waits in a group of its own says nothing of the main one.
TEST_F(WatchedWaits, AThreadBesideTheMainOneMayWaitAsLongAsItLikes) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto gathers = collectives_of(mesh, 0), saves = reductions_of(mesh);
    gather(gathers, "first gather");
    std::thread saving([&] {
      if (rank == 1) std::this_thread::sleep_for(Milliseconds(900));
      gather(saves, "save");
    });
    if (rank == 0) std::this_thread::sleep_for(Milliseconds(600));  // rank 1 waits for it
    gather(gathers, "second gather");
    saving.join();
  });
}

// One rank as the others see it, which looks when it is told to.
struct ToldRank {
  ToldRank(const GroupName& name, int64_t number)
      : rank(std::make_shared<WatchedRank>(name, number)),
        gathers(rank->add_lane("gathers", std::make_shared<Issuers>(), [](const auto&) {})),
        reductions(rank->add_lane("reductions", std::make_shared<Issuers>(), [](const auto&) {})) {}
  void look() { rank->look(Milliseconds(0)); }

  std::shared_ptr<WatchedRank> rank;
  std::shared_ptr<WatchedLane> gathers, reductions;
};

// It may have gone on since.
TEST(WatchedRanks, OneThatTellsNoMoreIsNoReasonForAnError) {
  const GroupName name{c10::make_intrusive<c10d::HashStore>(), "job/", "group"};
  ToldRank first(name, 0), second(name, 1);
  const auto gather = first.gathers->issue("gather"), sum = second.reductions->issue("sum");
  const WaitScope waits_for_gather(gather), waits_for_sum(sum);
  gather->waits_for(1, nullptr);
  sum->waits_for(0, nullptr);
  second.look();
  for (int i = 0; i < 10; ++i) first.look();
  EXPECT_EQ(gather->verdict(), "");
  for (int i = 0; i < 10; ++i) {
    second.look();
    first.look();
  }
  EXPECT_THAT(gather->verdict(), HasSubstr("sum"));
}

// As training does with two lanes: what is posted on the one and the other in another
// order on each rank, and waited for later.
TEST_F(WatchedWaits, RandomOrdersAcrossLanesAndRandomDelaysAreNoErrors) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto world = Collectives::of(default_process_group(), c10::kCPU);
    const auto dp = collectives_of(mesh, 0), tp = collectives_of(mesh, 1);
    const auto side = dp.beside(mesh.side_group(0, "beside"));
    std::mt19937 common(3), own(static_cast<unsigned>(rank));
    const auto pause = [&] {
      if (own() % 3 == 0) std::this_thread::sleep_for(Milliseconds(own() % 120));
    };
    const auto row = at::zeros({8}, at::kByte);
    for (int i = 0; i < 40; ++i) {
      const bool gathers_first = own() % 2 == 0;
      std::vector<InFlight<GatheredRows>> started;
      for (const bool on_dp : {gathers_first, !gathers_first}) {
        started.push_back(
            (on_dp ? dp : side)
                .start(AllGatherOptions{.input = row, .what = on_dp ? "gather" : "sum"}));
        pause();
      }
      for (auto& each : started) each.wait();
      pause();
      if (common() % 2 == 0) gather(tp, "tensor parallel");
      if (common() % 4 == 0) gather(world, "clipping");
    }
  });
}

// For what another rank of the host does, as reads of shards wait.
class WaitForFlag final : public PeerWait {
 public:
  explicit WaitForFlag(const std::atomic<bool>& flag) : PeerWait({}), flag_(flag) {}
  bool has_come() override { return flag_; }
  void abort() override {}

 private:
  bool finish() override { return flag_; }
  const std::atomic<bool>& flag_;
};

// Rank 0 waits for what rank 1 would issue next, and rank 1 for rank 0. A thread that has
// not run since what it waits for has come is not one that waits.
TEST_F(WatchedWaits, WhatHasComeIsNotWaitedFor) {
  std::latch both_looked(2), both_know(2);
  run_ranks(2, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto gathers = collectives_of(mesh, 0);
    const auto refuse = [](const std::string&) {};
    const auto issuers = std::make_shared<Issuers>();
    const auto watched = WatchedRank::of(*name_in_job(gathers.group()), rank);
    const auto lane = watched->add_lane("beside", issuers, refuse);
    gather(gathers, "first gather");
    std::atomic<bool> has_come = rank == 1;
    const auto operation = rank == 0 ? lane->issue("sum") : lane->wait_apart("read");
    const WaitScope scope(operation);
    operation->waits_for(1 - rank, c10::make_intrusive<WaitForFlag>(has_come));
    std::this_thread::sleep_for(Milliseconds(600));
    EXPECT_EQ(operation->verdict(), "");
    both_looked.arrive_and_wait();
    has_come = false;
    for (int tries = 0; operation->verdict().empty() && tries < 1000; ++tries)
      std::this_thread::sleep_for(Milliseconds(10));
    EXPECT_THAT(operation->verdict(), AllOf(HasSubstr("rank 1 waits in the read for rank 0"),
                                            HasSubstr("rank 0 waits in the sum")));
    both_know.arrive_and_wait();
  });
}

}  // namespace
}  // namespace fsdp::internal
