// A trace's ranges of redistributions beside what CommunicationLog has of the same step.
#include "fully_shard/profile.h"

#include "tensor_parallel/communication_log.h"
#include "tests/support/trace_file.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <map>
#include <optional>
#include <string>

namespace fsdp::testing {
namespace {

// "fsdp::redistribute(all-gather over tp, Shard(1) -> Replicate()) 128 bytes": how often.
using Names = std::map<std::string, int64_t>;

std::string range_of(const Communication& each) {
  std::ostringstream name;
  name << "fsdp::redistribute(" << each.collective << " over " << each.mesh_dim << ", " << each.from
       << " -> " << each.to << ") " << each.bytes << " bytes";
  return name.str();
}

// Of the second step, on rank 0, of which Kineto sees that step alone.
void expect_ranges_of_log(int64_t dp, int64_t tp, bool cut_sequence) {
  constexpr ShardedPair::Config kModel{
      .vocab = 64, .width = 16, .blocks = 2, .heads = 4, .kv_heads = 4, .max_tokens = 8};
  const TraceFile file("tp_trace.json");
  Names logged;
  int64_t logged_bytes = 0;
  on_pairs(kModel, dp, tp, cut_sequence, {}, [&](ShardedPair& pair) {
    pair.sharded_loss().backward();
    pair.sharded->zero_grad();
    std::optional<Profile> profile;
    if (pair.mesh.rank() == 0) profile.emplace(file.path(), ProfileOptions{.last_step = 1});
    const CommunicationLog log;
    pair.sharded_loss().backward();
    if (!profile) return;
    profile->step();
    for (const auto& each : log.entries()) ++logged[range_of(each)];
    logged_bytes = log.bytes();
  });
  const auto events = events_in(file.path());
  Names traced;
  for (const auto& event : events) {
    if (is_range(event, "redistribute")) ++traced[event.at("name").get<std::string>()];
  }
  EXPECT_EQ(traced, logged);
  EXPECT_EQ(sum_of(events, "redistribute").bytes, logged_bytes);
  EXPECT_GT(logged_bytes, 0);
}

TEST(Profile, RangesOfRedistributionsAreThoseOfTheCommunicationLog) {
  for (const bool cut_sequence : {false, true}) {
    expect_ranges_of_log(1, 2, cut_sequence);
    expect_ranges_of_log(2, 2, cut_sequence);
  }
}

// As in a loop whose every step has a log, which the profile begins and ends in.
TEST(Profile, BeginsAndEndsWithinLogsOfOneStepEach) {
  const TraceFile file("steps.json");
  Profile profile(file.path(), {.first_step = 2, .last_step = 3});
  for (int step = 1; step <= 4; ++step) {
    const CommunicationLog log;
    at::ones({2});
    profile.step();
  }
  int64_t steps = 0;
  for (const auto& event : events_in(file.path())) steps += event.at("name") == "aten::ones";
  EXPECT_EQ(steps, 2);
}

}  // namespace
}  // namespace fsdp::testing
