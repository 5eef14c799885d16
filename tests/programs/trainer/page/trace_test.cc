#include "programs/trainer/report/page/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace programs::run_report {
namespace {

using ::testing::HasSubstr;

Trace trace_of(const std::string& json) {
  std::istringstream text(json);
  return trace_in(text);
}

// A complete event.
std::string event(const std::string& name, double begin, double duration) {
  return R"({"ph": "X", "name": ")" + name + R"(", "ts": )" + std::to_string(begin) +
         R"(, "dur": )" + std::to_string(duration) + R"(, "pid": 1, "args": {"Ev Idx": {"x": 1}}})";
}

TEST(ReadTrace, TakesTheRangesOfUnitsAndOfTraining) {
  const auto trace = trace_of(R"({"baseTimeNanoseconds": 7000000000, "traceEvents": [)" +
                              event("fsdp::wait(block0)", 30, 5) + "," + event("aten::mm", 1, 100) +
                              "," + event("fsdp::all_gather((root)) 4096 bytes", 10, 2.5) + "," +
                              R"_({"ph": "i", "name": "fsdp::wait(block0)", "ts": 1})_" + "," +
                              event("fsdp::forward(block0)", 5, 1) + "," +
                              event("train::step(12)", 0, 1e6) + "]}");
  EXPECT_EQ(trace.base_nanoseconds, 7000000000);
  ASSERT_EQ(trace.ranges.size(), 3u);
  EXPECT_EQ(trace.ranges[0], (Range{RangeKind::kStep, "12", 0, 0, 1}));
  EXPECT_EQ(trace.ranges[1].of, "(root)");
  EXPECT_EQ(trace.ranges[1].kind, RangeKind::kGather);
  EXPECT_EQ(trace.ranges[1].bytes, 4096);
  EXPECT_DOUBLE_EQ(trace.ranges[1].begin, 10e-6);
  EXPECT_DOUBLE_EQ(trace.ranges[1].end, 12.5e-6);
  EXPECT_EQ(trace.ranges[2].kind, RangeKind::kWait);
}

TEST(ReadTrace, KnowsEveryKind) {
  const std::pair<const char*, RangeKind> kinds[] = {
      {"fsdp::all_gather(u) 1 bytes", RangeKind::kGather},
      {"fsdp::outer_all_gather(u) 1 bytes", RangeKind::kOuterGather},
      {"fsdp::prefetch(u)", RangeKind::kPrefetch},
      {"fsdp::all_gather_copy_out(u)", RangeKind::kCopyOut},
      {"fsdp::reduce_scatter(u) 1 bytes", RangeKind::kReduction},
      {"fsdp::all_reduce(u) 1 bytes", RangeKind::kReduction},
      {"fsdp::outer_reduce_scatter(u) 1 bytes", RangeKind::kReduction},
      {"fsdp::wait(u)", RangeKind::kWait},
      {"fsdp::reshard(u)", RangeKind::kReshard},
      {"fsdp::redistribute(u) 1 bytes", RangeKind::kRedistribution},
      {"train::step(u)", RangeKind::kStep},
      {"train::phase(u)", RangeKind::kPhase}};
  for (const auto& [name, kind] : kinds) {
    const auto trace = trace_of(R"({"traceEvents": [)" + event(name, 1, 1) + "]}");
    ASSERT_EQ(trace.ranges.size(), 1u) << name;
    EXPECT_EQ(trace.ranges[0].kind, kind) << name;
    EXPECT_EQ(trace.ranges[0].of, "u") << name;
  }
}

TEST(ReadTrace, PutsOuterRangesFirst) {
  const auto trace = trace_of(R"({"traceEvents": [)" + event("fsdp::all_gather(u) 8 bytes", 1, 1) +
                              "," + event("fsdp::prefetch(u)", 1, 2) + "]}");
  ASSERT_EQ(trace.ranges.size(), 2u);
  EXPECT_EQ(trace.ranges[0].kind, RangeKind::kPrefetch);
}

TEST(ReadTrace, RefusesWhatIsNoTrace) {
  for (const char* text : {"", "{", "[]", "{}", "3", R"({"traceEvents": [{"ph": "X", "name": )"}) {
    try {
      trace_of(text);
      ADD_FAILURE() << "no error for " << text;
    } catch (const std::invalid_argument&) {
    }
  }
}

TEST(ReadTrace, NamesAFileThatIsNotThere) {
  try {
    read_trace("no/such/trace.json");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/such/trace.json is not there"));
  }
}

}  // namespace
}  // namespace programs::run_report
