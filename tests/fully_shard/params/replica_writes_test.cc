// ReplicaWrites: what replicas that wrote, did not, or did not look say to each other.
#include "fully_shard/params/shard_writes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {
namespace {

using Word = ReplicaWrites::Word;

std::vector<uint64_t> words_of_replicas(const std::vector<ReplicaWrites>& replicas) {
  std::vector<uint64_t> words;
  for (const auto& each : replicas) words.push_back(each.word());
  return words;
}

void make_step(ReplicaWrites& replica) {
  replica.written();
  replica.run_ended();
  replica.used();
}

TEST(ReplicaWrites, DifferWhereOneWroteAndAnotherDidNot) {
  for (uint64_t first = 0; first < 3; ++first) {
    for (uint64_t second = 0; second < 3; ++second) {
      const bool differ = first != second && first != Word::kUnknown && second != Word::kUnknown;
      EXPECT_EQ(ReplicaWrites::agree({first, second}), !differ) << first << " " << second;
    }
  }
}

TEST(ReplicaWrites, AMissedStepStaysMissedUntilAllReplicasWrite) {
  std::vector<ReplicaWrites> replicas(3);
  for (auto& each : replicas) each.used();
  EXPECT_TRUE(ReplicaWrites::agree(words_of_replicas(replicas)));
  make_step(replicas[0]), make_step(replicas[2]);
  for (int backward = 0; backward < 2; ++backward)
    EXPECT_FALSE(ReplicaWrites::agree(words_of_replicas(replicas)));
  for (auto& each : replicas) make_step(each);
  const auto words = words_of_replicas(replicas);
  EXPECT_TRUE(ReplicaWrites::agree(words));
  for (auto& each : replicas) {
    each.compared(words);
    EXPECT_EQ(each.word(), Word::kUnknown);
  }
}

TEST(ReplicaWrites, GathersOfOneReplicaAloneAreNotCounted) {
  std::vector<ReplicaWrites> replicas(2);
  replicas[0].written(), replicas[0].run_ended();  // it evaluates
  for (auto& each : replicas) make_step(each);
  EXPECT_TRUE(ReplicaWrites::agree(words_of_replicas(replicas)));
}

TEST(ReplicaWrites, WhatOneReplicaDidNotUseIsComparedWhenItDoes) {
  std::vector<ReplicaWrites> replicas(2);
  for (auto& each : replicas) each.written();
  replicas[0].run_ended(), replicas[0].used();  // a unit that the other does not touch
  const auto words = words_of_replicas(replicas);
  EXPECT_EQ(words, (std::vector<uint64_t>{Word::kWrote, Word::kUnknown}));
  for (auto& each : replicas) each.compared(words);
  replicas[0].used();
  replicas[1].run_ended(), replicas[1].used();
  EXPECT_EQ(words_of_replicas(replicas), (std::vector<uint64_t>{Word::kWrote, Word::kWrote}));
}

}  // namespace
}  // namespace fsdp::internal
