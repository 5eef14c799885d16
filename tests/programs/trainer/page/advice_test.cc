#include "programs/trainer/report/page/advice.h"

#include "programs/words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace programs::run_report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kMiB = 1 << 20;

UnitRow row(const std::string& name, int64_t bytes, int64_t parameters = 9) {
  return {.unit = {.name = name,
                   .is_root = name == "(root)",
                   .parameters = parameters,
                   .bytes = bytes,
                   .gradient_bytes = bytes},
          .gathers = 2,
          .prefetched = 2,
          .gathered_bytes = double(bytes)};
}

// An embedding, four blocks, and a root that has the last norm; four ranks that wait for
// a tenth of the time.
RunFacts good_run() {
  RunFacts run{.sharding_ranks = 4,
               .ranks_on_host = 4,
               .cores = 4,
               .order_is_known = true,
               .step_seconds = 0.1,
               .ranks = std::vector<RankLoad>(4, {0.1, 0.09})};
  run.units = {row("(root)", 512, 1), row("embedding", kMiB, 1)};
  for (const char* block : {"block0", "block1", "block2", "block3"})
    run.units.push_back(row(block, 2 * kMiB));
  run.units[1].prefetched = 0;  // the first that a step needs
  run.units[1].exposed_seconds = 0.05;
  run.units[1].is_first = true;
  return run;
}

UnitRow& block1(RunFacts& run) { return run.units[3]; }

// The only advice on the run.
Advice only(const RunFacts& run) {
  const auto all = advice(run);
  EXPECT_EQ(all.size(), 1u);
  return all.empty() ? Advice{} : all.front();
}

TEST(AdviceOnRuns, IsNoneOnAGoodOne) { EXPECT_THAT(advice(good_run()), IsEmpty()); }

TEST(AdviceOnRuns, IsNoneOnOneRankWhateverItsUnits) {
  RunFacts run{.step_seconds = 1, .ranks = {{0.9, 1}}};
  run.units = {row("(root)", 9 * kMiB), row("tiny", 64)};
  EXPECT_THAT(advice(run), IsEmpty());
}

TEST(AdviceOnRuns, NamesSmallUnits) {
  auto run = good_run();
  run.units.push_back(row("norm", 3 << 10, 1));
  const auto one = only(run);
  EXPECT_EQ(one.title, "Merge 1 small unit with its neighbours");
  EXPECT_THAT(one.reason,
              AllOf(HasSubstr("norm (3.0 KiB) is smaller than 64.0 KiB"),
                    HasSubstr("It is 14 % of the gathers"), HasSubstr("0 % of the bytes"),
                    HasSubstr("fully_shard to a module around it")));
  for (const char* name : {"a", "b", "c", "d"}) run.units.push_back(row(name, 512, 1));
  EXPECT_THAT(only(run).title, HasSubstr("5 small units with their"));
  EXPECT_THAT(
      only(run).reason,
      HasSubstr("norm (3.0 KiB), a (512 bytes), b (512 bytes), c (512 bytes) and 1 more are"));
}

TEST(AdviceOnRuns, BeginsWhereAUnitIsSmall) {
  for (const int64_t bytes : {kSmallUnit - 1, kSmallUnit, kSmallUnit + 1}) {
    auto run = good_run();
    run.units.push_back(row("unit", bytes));
    EXPECT_EQ(advice(run).empty(), bytes >= kSmallUnit) << bytes;
  }
}

TEST(AdviceOnRuns, NamesAUnitThatHoldsNearlyAll) {
  auto run = good_run();
  run.units = {row("(root)", 30 * kMiB)};
  EXPECT_EQ(only(run).title, "Cut the root into several units");
  EXPECT_THAT(only(run).reason, AllOf(HasSubstr("The root holds 100 %"),
                                      HasSubstr("every block before the root (--units blocks)")));
  run.units = {row("(root)", 512, 1), row("trunk", 9 * kMiB), row("head", kMiB, 1)};
  EXPECT_EQ(only(run).title, "Cut trunk into several units");
  EXPECT_THAT(only(run).reason,
              AllOf(HasSubstr("trunk holds 90 %"), HasSubstr("to the modules below it")));
}

TEST(AdviceOnRuns, BeginsWhereAUnitHoldsNearlyAll) {
  const auto with = [](int64_t large, int64_t rest, int64_t parameters) {
    auto run = good_run();
    run.units = {row("a", large, parameters), row("b", rest)};
    return advice(run);
  };
  EXPECT_THAT(with(8 * kMiB, 2 * kMiB, 9), Not(IsEmpty()));
  EXPECT_THAT(with(8 * kMiB - 8, 2 * kMiB, 9), IsEmpty());
  EXPECT_THAT(with(8 * kMiB, 2 * kMiB, 1), IsEmpty());  // cannot be cut
  // Of models for which it does not matter:
  EXPECT_THAT(with(kMiB - 100'000, 100'000, 9), Not(IsEmpty()));
  EXPECT_THAT(with(kMiB - 100'001, 100'000, 9), IsEmpty());
}

TEST(AdviceOnRuns, TellsOfWaiting) {
  auto run = good_run();
  run.ranks = std::vector<RankLoad>(4, {0.4, 0.06});
  EXPECT_THAT(only(run).title, HasSubstr("40 % of the time is lost"));
  EXPECT_THAT(only(run).reason, AllOf(HasSubstr("told from 30 % on"), HasSubstr("--accumulate"),
                                      Not(HasSubstr("--replicas")), Not(HasSubstr("core"))));
}

TEST(AdviceOnRuns, BeginsWhereTheMeanWaitsMuch) {
  for (const double waiting : {0.29, 0.3, 0.31}) {
    auto run = good_run();
    run.ranks = {{waiting - 0.1, 0.06}, {waiting + 0.1, 0.06}};
    EXPECT_EQ(advice(run).empty(), waiting < 0.295) << waiting;
  }
}

TEST(AdviceOnRuns, KeepsGathersWithinAHostWhereTheyLeaveOne) {
  auto run = good_run();
  run.ranks = std::vector<RankLoad>(8, {0.4, 0.06});
  run.hosts = 2;
  EXPECT_THAT(only(run).reason, HasSubstr("--replicas 2"));
  run.replicas = 2;  // it does that
  EXPECT_THAT(only(run).reason, Not(HasSubstr("--replicas")));
}

TEST(AdviceOnRuns, SeesThatRanksShareCores) {
  auto run = good_run();
  run.ranks = std::vector<RankLoad>(4, {0.4, 0.06});
  run.cores = 2;
  EXPECT_THAT(only(run).reason, HasSubstr("4 ranks of 1 thread share 2 cores"));
  run.cores = 4;
  run.threads_per_rank = 2;
  EXPECT_THAT(only(run).reason, HasSubstr("4 ranks of 2 threads share 4 cores"));
  run.ranks = std::vector<RankLoad>(4, {0.1, 0.06});  // it does not hurt
  EXPECT_THAT(advice(run), IsEmpty());
}

TEST(AdviceOnRuns, NamesARankThatIsSlower) {
  auto run = good_run();
  run.ranks = {{0.5, 0.05}, {0.5, 0.05}, {0.1, 0.09, 1}, {0.5, 0.05}};
  EXPECT_EQ(only(run).title, "Give rank 2 less to do, or look at where it runs");
  EXPECT_THAT(only(run).reason, AllOf(HasSubstr("90.0 ms"), HasSubstr("50.0 ms"),
                                      HasSubstr("1.8 times"), HasSubstr("1.25 times")));
  run.ranks[2].waiting = 0.3;  // for the network, then
  EXPECT_EQ(advice(run).size(), 2u);
  run.ranks = {{0.1, 0.05}, {0.1, 0.09, 1}};
  run.cores = 3;  // then they are slow in turns
  EXPECT_THAT(advice(run), IsEmpty());
}

TEST(AdviceOnRuns, BeginsWhereARankIsMuchSlower) {
  const auto with = [](double slowest, double others, double step, double steps = 0.75) {
    auto run = good_run();
    run.step_seconds = step;
    run.ranks = {{0.1, others}, {0.1, others}, {0.1, slowest, steps}};
    return advice(run);
  };
  EXPECT_THAT(with(0.1251, 0.1, 0.13), Not(IsEmpty()));
  EXPECT_THAT(with(0.1249, 0.1, 0.13), IsEmpty());
  EXPECT_THAT(with(0.1251, 0.1, 0.13, 0.74), IsEmpty());  // by chance, perhaps
  EXPECT_THAT(with(0.0251, 0.015, 0.1), Not(IsEmpty()));
  EXPECT_THAT(with(0.0249, 0.015, 0.1), IsEmpty());  // a small part of the step
}

TEST(AdviceOnRuns, NamesUnitsThatAreNeverGatheredAhead) {
  auto run = good_run();
  block1(run).prefetched = 0;
  block1(run).exposed_seconds = 0.01;
  EXPECT_EQ(only(run).title, "Let the gathers of 1 unit begin earlier");
  EXPECT_THAT(only(run).reason,
              AllOf(HasSubstr("block1 (2.0 MiB): never gathered ahead"), HasSubstr("10 %")));
}

TEST(AdviceOnRuns, LeavesOutGathersAheadThatNeedNone) {
  for (const double exposed : {0.0019, 0.0021}) {
    auto run = good_run();
    block1(run).prefetched = 0;
    block1(run).exposed_seconds = exposed;
    EXPECT_EQ(advice(run).empty(), exposed < 0.002) << exposed;
    block1(run).prefetched = 0.5;
    EXPECT_THAT(advice(run), IsEmpty());
    block1(run).prefetched = 0;
    block1(run).is_first = true;
    EXPECT_THAT(advice(run), IsEmpty());
    block1(run).is_first = false;
    run.order_is_known = false;
    EXPECT_THAT(advice(run), IsEmpty());
  }
}

TEST(AdviceOnRuns, TellsOfPrefetchesThatWereDropped) {
  for (const double unused : {0.9, 1.0, 1.1}) {  // of ten
    auto run = good_run();
    block1(run).unused = unused;
    EXPECT_EQ(advice(run).empty(), unused < 1) << unused;
    run.order_is_known = false;
    EXPECT_THAT(advice(run), IsEmpty());
  }
  auto run = good_run();
  block1(run).unused = 2;
  EXPECT_THAT(only(run).reason, HasSubstr("20 % of the gathers ahead were dropped"));
}

TEST(AdviceOnRuns, SaysNothingOfWhatWasNotMeasured) {
  auto run = good_run();
  run.ranks.clear();
  run.step_seconds = 0;
  for (auto& each : run.units)
    each.gathers = each.prefetched = each.gathered_bytes = each.exposed_seconds = 0;
  EXPECT_THAT(advice(run), IsEmpty());
  run.units.push_back(row("norm", 512, 1));
  run.units.back().gathers = 0;
  EXPECT_THAT(only(run).reason, Not(HasSubstr("of the gathers of a step")));
}

TEST(AdviceOnRuns, PutsWhatMattersMostFirst) {
  auto run = good_run();
  run.ranks = std::vector<RankLoad>(4, {0.4, 0.06});
  run.units = {row("(root)", 30 * kMiB), row("norm", 512, 1)};
  const auto all = advice(run);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_THAT(all[0].title, HasSubstr("Cut the root"));
  EXPECT_THAT(all[1].title, HasSubstr("wait less"));
  EXPECT_THAT(all[2].title, HasSubstr("Merge"));
}

TEST(BytesInWords, AreRounded) {
  EXPECT_EQ(bytes_in_words(0), "0 bytes");
  EXPECT_EQ(bytes_in_words(1023), "1023 bytes");
  EXPECT_EQ(bytes_in_words(1024), "1.0 KiB");
  EXPECT_EQ(bytes_in_words(1.5 * kMiB), "1.5 MiB");
  EXPECT_EQ(bytes_in_words(3.0 * 1024 * kMiB), "3.0 GiB");
  EXPECT_EQ(bytes_in_words(5000.0 * 1024 * kMiB), "5000.0 GiB");
}

}  // namespace
}  // namespace programs::run_report
