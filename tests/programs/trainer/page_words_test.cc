#include "programs/trainer/report/page_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

namespace programs {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

void expect_ranks(const TrainingOptions& options, const RanksAndHosts& where,
                  const std::string& words) {
  EXPECT_THAT(settings_in_words(options, where, {}), Contains(Pair("ranks", words)));
}

TEST(SettingsInWords, SayHowTheRanksShare) {
  TrainingOptions options;
  expect_ranks(options, {.ranks = 1, .hosts = 1}, "1 on 1 host");
  options.replicas = 2;
  expect_ranks(options, {.ranks = 4, .hosts = 2}, "4 on 2 hosts, 2 replicas");
  options.tp = 2;
  expect_ranks(options, {.ranks = 8, .hosts = 2},
               "8 on 2 hosts, 2 replicas, tensor parallelism of 2");
}

TEST(AboutTheBound, OneUnitHasNoLargestOne) {
  TrainingOptions options;
  run_report::Sharding sharding{.ranks = 2};
  for (const auto where : {run_report::Unsharded::kInPlace, run_report::Unsharded::kGathered}) {
    sharding.where = where;
    options.units = Units::kBlocks;
    EXPECT_THAT(about_bound(options, sharding), HasSubstr("largest unit"));
    options.units = Units::kRoot;
    EXPECT_THAT(about_bound(options, sharding), Not(HasSubstr("largest unit")));
  }
}

}  // namespace
}  // namespace programs
