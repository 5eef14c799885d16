#include "device_mesh/rendezvous/presence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two processes on each of two hosts of four cores.
const std::vector<Presence> kTwoHosts = {{.host = "a", .pid = 1},
                                         {.host = "b", .pid = 1},
                                         {.host = "a", .pid = 2},
                                         {.host = "b", .pid = 2}};

TEST(AdviceAboutThreads, IsOfTheFirstRankOfEachHost) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 4, 4),
              AllOf(HasSubstr("2 ranks on host 'a' compute with 4 threads each on 4 cores"),
                    HasSubstr("OMP_NUM_THREADS=2,")));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 1, 4, 4), HasSubstr("host 'b'"));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 2, 4, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads(kTwoHosts, 3, 4, 4), IsEmpty());
}

TEST(AdviceAboutThreads, IsNoneWhereCoresAreEnough) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 2, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 3, 4), HasSubstr("OMP_NUM_THREADS=2,"));
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 2, 1), HasSubstr("OMP_NUM_THREADS=1,"));
}

TEST(AdviceAboutThreads, IsNoneWhereRanksHaveOneThread) {
  EXPECT_THAT(advice_about_threads(kTwoHosts, 0, 1, 1), IsEmpty());
}

TEST(AdviceAboutThreads, IsNoneToOneRankNorToRanksThatAreThreads) {
  EXPECT_THAT(advice_about_threads({{.host = "a", .pid = 1}}, 0, 8, 4), IsEmpty());
  EXPECT_THAT(advice_about_threads({{.host = "a", .pid = 1}, {.host = "a", .pid = 1}}, 0, 4, 4),
              IsEmpty());
}

}  // namespace
}  // namespace fsdp::internal
