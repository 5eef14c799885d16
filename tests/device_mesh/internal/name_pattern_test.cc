// What a '*' means in the names of parameters and modules.
#include "device_mesh/internal/name_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::internal {
namespace {

using ::testing::ElementsAre;

TEST(NamePattern, AStarStandsForPartOfOneName) {
  EXPECT_TRUE(is_match("block*.mlp.up", "block12.mlp.up"));
  EXPECT_TRUE(is_match("block*.*norm", "block0.attention_norm"));
  EXPECT_TRUE(is_match("*norm", "norm"));
  EXPECT_TRUE(is_match("*a*a*", "banana"));
  EXPECT_TRUE(is_match("", ""));
  EXPECT_FALSE(is_match("*norm", "block0.norm"));
  EXPECT_FALSE(is_match("block*", "block0.mlp"));
  EXPECT_FALSE(is_match("mlp", "mlp.up"));
  EXPECT_FALSE(is_match("", "mlp"));
  EXPECT_FALSE(is_match("*", "a.b"));
}

TEST(NamePattern, GivesWhatStarsStandForAndWhatIsBelow) {
  const auto found = match_name("block*.*norm", "block12.attention_norm.weight");
  ASSERT_TRUE(found);
  EXPECT_THAT(found->stars, ElementsAre("12", "attention_"));
  EXPECT_EQ(found->below, ".weight");
  EXPECT_FALSE(match_name("block*.*norm", "block12.attention_norms"));
}

TEST(NamePattern, TakesTheShortestStarsTheFirstBeforeTheOthers) {
  EXPECT_THAT(match_name("*a*", "banana")->stars, ElementsAre("b", "nana"));
  EXPECT_THAT(match_name("*a*a", "banana")->stars, ElementsAre("b", "nan"));
}

}  // namespace
}  // namespace fsdp::internal
