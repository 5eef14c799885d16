#include "tests/simulated_accelerator/access_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing::simulated {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Bytes [first, end) of one block.
Access bytes(size_t first, size_t end, bool are_written) {
  static const char block[100] = {};
  return {block + first, block + end, are_written};
}

ItemName item(size_t queue, uint64_t number, const std::string& operation) {
  return {{queue, number}, operation, static_cast<int>(queue)};
}

TEST(AccessHistory, NamesAPairThatNothingOrders) {
  AccessHistory history;
  EXPECT_THAT(history.note(bytes(0, 8, true), item(0, 1, "write"), {}), IsEmpty());
  EXPECT_THAT(history.note(bytes(4, 6, false), item(1, 1, "read"), {}),
              ElementsAre("write (stream 0) and read (stream 1)"));
}

TEST(AccessHistory, TakesOneQueueAsOrdered) {
  AccessHistory history;
  history.note(bytes(0, 8, true), item(0, 1, "write"), {});
  EXPECT_THAT(history.note(bytes(0, 8, true), item(0, 2, "write again"), {}), IsEmpty());
}

TEST(AccessHistory, TakesWhatTheItemWaitsForAsOrdered) {
  AccessHistory history;
  history.note(bytes(0, 8, true), item(0, 3, "write"), {});
  Clock too_little, enough;
  too_little.add({0, 2});
  enough.add({0, 3});
  EXPECT_THAT(history.note(bytes(0, 8, false), item(1, 1, "early"), too_little),
              ElementsAre("write (stream 0) and early (stream 1)"));
  EXPECT_THAT(history.note(bytes(0, 8, false), item(2, 1, "late"), enough), IsEmpty());
}

TEST(AccessHistory, LetsReadsAndOtherBytesAlone) {
  AccessHistory history;
  history.note(bytes(0, 8, false), item(0, 1, "read"), {});
  history.note(bytes(8, 16, true), item(0, 2, "write"), {});
  EXPECT_THAT(history.note(bytes(0, 8, false), item(1, 1, "other read"), {}), IsEmpty());
  EXPECT_THAT(history.note(bytes(16, 24, true), item(1, 2, "other bytes"), {}), IsEmpty());
}

TEST(AccessHistory, KeepsReadsUntilAWriteIsOrderedAfterThem) {
  AccessHistory history;
  history.note(bytes(0, 8, true), item(0, 1, "write"), {});
  Clock known;
  known.add({0, 1});
  history.note(bytes(0, 8, false), item(1, 1, "read"), known);
  EXPECT_THAT(history.note(bytes(0, 8, true), item(2, 1, "overwrite"), known),
              ElementsAre("read (stream 1) and overwrite (stream 2)"));
}

}  // namespace
}  // namespace fsdp::testing::simulated
