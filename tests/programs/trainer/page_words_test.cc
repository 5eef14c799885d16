#include "programs/trainer/report/page_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

namespace programs {
namespace {

using ::testing::Contains;
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

}  // namespace
}  // namespace programs
