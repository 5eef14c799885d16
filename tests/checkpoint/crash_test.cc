// A save that dies or fails at any file-system call leaves the previous checkpoint or the
// new one, whole, and the next save works and leaves no litter.
#include "checkpoint/checkpoint.h"
#include "checkpoint/internal/file_calls.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>

namespace fsdp::testing {
namespace {

using internal::checkpoint::set_file_call_hook;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

void save_value(const std::string& path, double value, bool overwrite) {
  save({.tensors = {{"w", torch::full({3, 2}, value)}}}, path,
       {.overwrite = overwrite, .step = static_cast<int64_t>(value)});
}

// The one value that the newest checkpoint holds; 0 for no checkpoint.
double newest_value(const TemporaryFolder& folder) {
  const auto latest = latest_checkpoint(folder.path());
  if (!latest) return 0;
  auto w = torch::zeros({3, 2});
  load({.tensors = {{"w", w}}}, *latest);
  EXPECT_TRUE(torch::equal(w, torch::full({3, 2}, w[0][0].item<double>())));
  return w[0][0].item<double>();
}

std::set<std::string> entries(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

void expect_next_save_is_clean(const TemporaryFolder& folder) {
  save_value(folder / "last", 9, /*overwrite=*/true);
  EXPECT_EQ(newest_value(folder), 9);
  EXPECT_EQ(entries(folder.path()), std::set<std::string>{"last"});
  EXPECT_EQ(entries(folder / "last"), (std::set<std::string>{"checkpoint.json", "tensors"}));
}

// Counts calls and lets call number `at` do something else.
class CallCounter {
 public:
  explicit CallCounter(std::function<int(int call, std::string_view name)> act) {
    set_file_call_hook([this, act = std::move(act)](std::string_view name, const std::string&) {
      return act(count_++, name);
    });
  }
  ~CallCounter() { set_file_call_hook(nullptr); }
  int count() const { return count_; }

 private:
  std::atomic<int> count_ = 0;
};

TEST(Crash, AFullDiskAtAnyCallLeavesTheOldOneOrTheNew) {
  for (const bool overwrite : {false, true}) {
    for (int at = 0;; ++at) {
      TemporaryFolder folder;
      if (overwrite) save_value(folder / "last", 1, false);
      int calls = 0;
      bool threw = false;
      {
        CallCounter counter([&](int call, std::string_view) { return call == at ? ENOSPC : 0; });
        try {
          save_value(folder / "last", 2, overwrite);
        } catch (const c10::Error& error) {
          threw = true;
          EXPECT_THAT(error.what(), HasSubstr("No space left on device"));
        }
        calls = counter.count();
      }
      EXPECT_EQ(newest_value(folder), threw ? (overwrite ? 1 : 0) : 2) << "call " << at;
      expect_next_save_is_clean(folder);
      if (calls <= at) break;
      ASSERT_LT(at, 100);
    }
  }
}

// Saves 2, cut over two ranks; returns whether it threw, on both.
bool save_sharded_throws(const std::string& path, bool overwrite) {
  std::atomic<int> threw = 0;
  run_ranks(2, [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    const auto w = distribute_tensor(torch::full({3, 2}, 2.0), mesh, {Shard{0}});
    try {
      save({.tensors = {{"w", w}}}, path, {.overwrite = overwrite, .step = 2});
    } catch (const c10::Error& error) {
      threw += 1;
      EXPECT_THAT(error.what(), HasSubstr("No space left on device"));
    }
  });
  EXPECT_TRUE(threw == 0 || threw == 2) << threw;
  return threw != 0;
}

TEST(Crash, AFullDiskOfAnyRankIsEveryRanksErrorAndLeavesTheOldOneOrTheNew) {
  for (const bool overwrite : {false, true}) {
    for (int at = 0;; ++at) {
      TemporaryFolder folder;
      if (overwrite) save_value(folder / "last", 1, false);
      int calls = 0;
      bool threw = false;
      {
        CallCounter counter([&](int call, std::string_view) { return call == at ? ENOSPC : 0; });
        threw = save_sharded_throws(folder / "last", overwrite);
        calls = counter.count();
      }
      EXPECT_EQ(newest_value(folder), threw ? (overwrite ? 1 : 0) : 2) << "call " << at;
      expect_next_save_is_clean(folder);
      if (calls <= at) break;
      ASSERT_LT(at, 100);
    }
  }
}

TEST(Crash, WithoutExchangeTheOldOneIsFoundBetweenTheTwoRenames) {
  TemporaryFolder folder;
  save_value(folder / "last", 1, false);
  int renames = 0;
  {
    CallCounter counter([&](int, std::string_view name) {
      if (name == "exchange") return EINVAL;
      if (name == "rename" && ++renames >= 2) return EIO;
      return 0;
    });
    EXPECT_THROW(save_value(folder / "last", 2, true), c10::Error);
  }
  EXPECT_EQ(renames, 3);  // away, into place, back: the last two failed
  EXPECT_FALSE(fs::exists(folder / "last"));
  EXPECT_EQ(newest_value(folder), 1);
  expect_next_save_is_clean(folder);
}

// Of process ranks: rank CRASH_RANK kills itself at its call number CRASH_AT.
const ChildCase kKilled("checkpoint_killed", [] {
  init_process_group({.timeout = std::chrono::seconds(4)});
  const char* at = std::getenv("CRASH_AT");
  CallCounter counter([&](int call, std::string_view) {
    if (call == std::atoi(at)) kill(getpid(), SIGKILL);
    return 0;
  });
  const char* who = std::getenv("CRASH_RANK");
  if (std::getenv("RANK") != std::string(who)) set_file_call_hook(nullptr);
  const auto mesh = init_device_mesh(torch::kCPU, {2});
  const auto w = distribute_tensor(torch::full({3, 2}, 2.0), mesh, {Shard{0}});
  save({.tensors = {{"w", w}}}, std::getenv("CRASH_PATH"), {.overwrite = true, .step = 2});
  destroy_process_group();
  return 0;
});

TEST(Crash, KilledRanksLeaveTheOldOneOrTheNew) {
  std::set<double> seen;
  for (const int rank : {0, 1}) {
    for (const int at : rank == 0 ? std::vector<int>{3, 12, 16, 17, 18} : std::vector<int>{1}) {
      TemporaryFolder folder;
      save_value(folder / "last", 1, false);
      const auto ends = run_processes("checkpoint_killed", 2, std::chrono::seconds(30),
                                      {{"CRASH_AT", std::to_string(at)},
                                       {"CRASH_RANK", std::to_string(rank)},
                                       {"CRASH_PATH", folder / "last"}});
      EXPECT_EQ(ends[static_cast<size_t>(rank)].exit_code, 128 + SIGKILL) << at;
      const double value = newest_value(folder);
      EXPECT_TRUE(value == 1 || value == 2) << value;
      seen.insert(value);
      expect_next_save_is_clean(folder);
    }
  }
  EXPECT_EQ(seen.size(), 2u);  // both sides of the commit were hit
}

TEST(Crash, OnlyTheLastCheckpointsAreKept) {
  TemporaryFolder folder;
  for (int step = 1; step <= 4; ++step) {
    save({.values = {{"step", step}}}, folder / ("step-" + std::to_string(step)),
         {.step = step, .keep_last = 2});
  }
  EXPECT_EQ(entries(folder.path()), (std::set<std::string>{"step-3", "step-4"}));
  EXPECT_EQ(*latest_checkpoint(folder.path()), folder / "step-4");
  EXPECT_EQ(load({}, folder / "step-4").step, 4);
  fs::resize_file(folder / "step-4/checkpoint.json", 20);
  EXPECT_EQ(*latest_checkpoint(folder.path()), folder / "step-3");  // damaged: does not count
}

}  // namespace
}  // namespace fsdp::testing
