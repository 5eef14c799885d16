#include "fully_shard/profile.h"

#include "fully_shard/counters.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/trace_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The members that trace viewers need of a complete event.
void expect_is_trace(const nlohmann::json& events) {
  ASSERT_TRUE(events.is_array());
  int64_t complete = 0;
  for (const auto& event : events) {
    ASSERT_TRUE(event.at("ph").is_string()) << event;
    ASSERT_TRUE(event.at("name").is_string()) << event;
    if (event.at("ph") != "X") continue;
    ++complete;
    for (const char* number : {"ts", "dur"}) ASSERT_TRUE(event.at(number).is_number()) << event;
    for (const char* place : {"pid", "tid"}) ASSERT_TRUE(event.contains(place)) << event;
  }
  EXPECT_GT(complete, 0);
}

// Rank 0 profiles its steps 2 and 3 of 4; Kineto is one for the process.
void expect_trace_of_counters(const std::vector<int64_t>& shape, const FullyShardOptions& options) {
  const TraceFile file("trace.json");
  int64_t ranks = 1;
  for (const auto size : shape) ranks *= size;
  Counters before, after;
  run_ranks(ranks, [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, shape);
    const auto model = build_seeded([] { return decoder_model(4, 2); });
    shard_decoder_with(options, *model.module, mesh);
    std::optional<Profile> profile;
    if (rank == 0) profile.emplace(file.path(), ProfileOptions{.first_step = 2, .last_step = 3});
    for (int64_t step = 1; step <= 4; ++step) {
      if (rank == 0 && step == 2) before = counters(mesh);
      model.loss(make_data(1)).backward();
      for (auto& parameter : model.module->parameters()) {
        const torch::NoGradGuard no_grad;
        if (parameter.grad().defined()) parameter.sub_(0.01 * parameter.grad());
        parameter.mutable_grad().reset();
      }
      if (rank == 0 && step == 3) after = counters(mesh);
      if (profile) profile->step();
    }
  });
  const auto events = events_in(file.path());
  expect_is_trace(events);
  const auto expect = [&](const char* what, int64_t Counters::*count, int64_t Counters::*bytes) {
    EXPECT_EQ(sum_of(events, what),
              (RangeSum{after.*count - before.*count, after.*bytes - before.*bytes}))
        << what;
  };
  expect("all_gather", &Counters::all_gathers, &Counters::all_gather_bytes);
  expect("reduce_scatter", &Counters::reduce_scatters, &Counters::reduce_scatter_bytes);
  expect("all_reduce", &Counters::all_reduces, &Counters::all_reduce_bytes);
  expect("outer_all_gather", &Counters::outer_all_gathers, &Counters::outer_all_gather_bytes);
  expect("outer_reduce_scatter", &Counters::outer_reduce_scatters,
         &Counters::outer_reduce_scatter_bytes);
  EXPECT_EQ(sum_of(events, "prefetch").count,
            after.prefetched_all_gathers - before.prefetched_all_gathers);
  EXPECT_EQ(sum_of(events, "reshard").count, after.reshards - before.reshards);
  EXPECT_GT(sum_of(events, "wait").count, 0);
  EXPECT_GT(after.all_gather_bytes, before.all_gather_bytes);
}

TEST(Profile, RangesAddUpToTheCounters) { expect_trace_of_counters({2}, {}); }
TEST(Profile, RangesOfPartsThatStayAddUp) {
  expect_trace_of_counters({4}, {.reshard_after_forward = ReshardAfterForward::to_world(2)});
}
TEST(Profile, RangesOfReplicasAddUp) { expect_trace_of_counters({2, 2}, {}); }
TEST(Profile, RangesOfHfsdpAddUp) {
  expect_trace_of_counters({2, 2}, {.outer = Outer::kShardOptimizer});
}

TEST(Profile, IsWrittenWhereTheLastStepDoesNotCome) {
  const TraceFile file("trace.json"), late("late.json");
  { const Profile profile(file.path()); }
  EXPECT_TRUE(events_in(file.path()).is_array());
  {
    Profile profile(late.path(), {.first_step = 5});
    profile.step();
  }
  EXPECT_FALSE(std::filesystem::exists(late.path()));
}

TEST(Profile, OfEveryRankHasItsNumber) {
  const TraceFile file("trace.rank0.json"), asked("trace.json");
  { const Profile profile(asked.path(), {.on_every_rank = true}); }
  EXPECT_TRUE(events_in(file.path()).is_array());
}

TEST(Profile, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of([] { Profile("trace.json", {.first_step = 0}); }),
              HasSubstr("steps 0 to"));
  EXPECT_THAT(message_of([] { Profile("trace.json", {.first_step = 3, .last_step = 2}); }),
              HasSubstr("steps 3 to 2"));
  EXPECT_THAT(message_of([] { Profile("/no/folder/trace.json"); }),
              AllOf(HasSubstr("'/no/folder/trace.json'"), HasSubstr("no folder")));
}

}  // namespace
}  // namespace fsdp::testing
