// The record of collectives, and where records of several ranks part.
#include "device_mesh/collectives/operation_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::CollectiveKind;
using internal::first_difference;
using internal::OperationRecord;
using internal::parse_operations;
using internal::RecordedOperation;
using internal::to_text;

using Operations = std::vector<RecordedOperation>;
using ByRank = std::map<int64_t, Operations>;

TEST(OperationRecord, KeepsTheLastOnesOldestFirst) {
  OperationRecord record;
  EXPECT_TRUE(record.operations().empty());
  const auto count = static_cast<uint32_t>(OperationRecord::kCapacity);
  for (uint32_t i = 0; i < 2 * count + 3; ++i) {
    record.add({.lane = i % 2, .sequence = i, .what = "gather", .bytes = i});
    const auto operations = record.operations();
    ASSERT_EQ(operations.size(), std::min<size_t>(i + 1, count));
    for (size_t k = 0; k < operations.size(); ++k)
      ASSERT_EQ(operations[operations.size() - 1 - k].sequence, i - k);
  }
}

TEST(OperationRecord, TravelsAsText) {
  const Operations operations = {{0, 1, "all-gather of unit 'a b'", 352},
                                 {1, 7, "sum", 0, CollectiveKind::kAllReduce}};
  EXPECT_EQ(parse_operations(to_text(operations)), operations);
  EXPECT_TRUE(parse_operations("").empty());
  EXPECT_TRUE(parse_operations("something else\n1 2\n").empty());
}

TEST(OperationRecord, RecordsThatAgreeDoNotPart) {
  const Operations both = {{0, 1, "gather a", 4}, {1, 1, "reduce a", 8}, {0, 2, "gather b", 4}};
  EXPECT_EQ(first_difference({}), "");
  EXPECT_EQ(first_difference({{0, both}}), "");
  EXPECT_EQ(first_difference({{0, both}, {1, both}}), "");
}

TEST(OperationRecord, TheFirstOperationThatDiffersIsTold) {
  const Operations left = {{0, 1, "gather a", 4}, {0, 2, "gather b", 4}, {0, 3, "gather c", 4}};
  const Operations right = {{0, 1, "gather a", 4}, {0, 2, "gather c", 4}};
  EXPECT_EQ(first_difference({{0, left}, {1, right}}),
            "operation 2: rank 0 issued gather b (4 bytes); rank 1 issued gather c (4 bytes)");
  const Operations other_bytes = {{0, 1, "gather a", 8}};
  EXPECT_EQ(first_difference({{0, left}, {5, other_bytes}}),
            "operation 1: rank 0 issued gather a (4 bytes); rank 5 issued gather a (8 bytes)");
}

TEST(OperationRecord, WhatARankDidNotIssueIsTold) {
  const Operations ahead = {{0, 1, "gather a", 4}, {0, 2, "gather b", 4}};
  const Operations behind = {{0, 1, "gather a", 4}};
  EXPECT_EQ(first_difference({{0, ahead}, {1, behind}}),
            "operation 2: rank 0 issued gather b (4 bytes); rank 1 issued nothing");
}

TEST(OperationRecord, LanesAreComparedApart) {
  const Operations gathers = {{0, 1, "gather a", 4}};
  const Operations reduces = {{1, 1, "reduce a", 4}};
  EXPECT_EQ(first_difference({{0, gathers}, {1, reduces}}),
            "operation 1: rank 0 issued gather a (4 bytes); rank 1 issued nothing; and at "
            "operation 1: rank 0 issued nothing; rank 1 issued reduce a (4 bytes)");
}

TEST(OperationRecord, WhatOneRankForgotIsNotCompared) {
  OperationRecord longer, shorter;
  for (uint32_t i = 1; i <= 70; ++i) longer.add({.sequence = i, .what = "gather", .bytes = 4});
  for (uint32_t i = 1; i <= 69; ++i) shorter.add({.sequence = i, .what = "gather", .bytes = 4});
  EXPECT_EQ(first_difference({{0, longer.operations()}, {1, shorter.operations()}}),
            "operation 70: rank 0 issued gather (4 bytes); rank 1 issued nothing");
}

}  // namespace
}  // namespace fsdp::testing
