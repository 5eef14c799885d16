// The rules of prefetching on turns that are written down here.
#include "tests/fully_shard/random_programs/repeated_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Optional;

// Backward enters unit 1 and then unit 0, which it gathers.
std::vector<UnitTurn> backward_of_two() {
  return {{.what = "backward b", .unit = 1, .in_backward = true},
          {.what = "backward a", .unit = 0, .in_backward = true}};
}

TEST(RepeatedStep, GathersTheNextUnitWhenOneIsEntered) {
  auto turns = backward_of_two();
  EXPECT_THAT(wrong_prefetch(turns, {}), Optional(HasSubstr("was not issued ahead")));
  turns[0].on_the_way = {0};
  EXPECT_EQ(wrong_prefetch(turns, {}), std::nullopt);
}

TEST(RepeatedStep, GathersTheNextUnitOnceTheGradientsHaveLeft) {
  const PrefetchRule after_gradients{.after_gradients = true};
  auto turns = backward_of_two();
  EXPECT_EQ(wrong_prefetch(turns, after_gradients), std::nullopt) << "when they have is not told";
  turns[0].on_the_way_after_gradients = {0};
  EXPECT_EQ(wrong_prefetch(turns, after_gradients), std::nullopt);
  turns[0].on_the_way_after_gradients->clear();
  EXPECT_THAT(wrong_prefetch(turns, after_gradients), Optional(HasSubstr("had left")));
  turns[0].on_the_way = {0};
  EXPECT_THAT(wrong_prefetch(turns, after_gradients), Optional(HasSubstr("too early")));
}

TEST(RepeatedStep, GathersNothingAheadThatIsThereOrGoesInThatMoment) {
  auto turns = backward_of_two();
  turns[0].resident_before = {0};
  EXPECT_EQ(wrong_prefetch(turns, {}), std::nullopt);
  turns[1].resident_before = {0};
  EXPECT_EQ(wrong_prefetch(turns, {}), std::nullopt);
}

TEST(RepeatedStep, DoesNotGatherAheadWhatIsNotTo) {
  auto turns = backward_of_two();
  EXPECT_EQ(wrong_prefetch(turns, {.never = {0}}), std::nullopt);
  turns[0].on_the_way = {0};
  EXPECT_THAT(wrong_prefetch(turns, {.never = {0}}), Optional(HasSubstr("too early")));
}

TEST(RepeatedStep, DoesNotGuessTheFirstUnitOfABackward) {
  auto turns = backward_of_two();
  turns[1].unit = turns[0].unit;
  EXPECT_EQ(wrong_prefetch(turns, {}), std::nullopt);
}

}  // namespace
}  // namespace fsdp::testing
