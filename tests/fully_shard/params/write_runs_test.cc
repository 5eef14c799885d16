// WriteRuns against what the ranks of a small world hold and write, in every sequence of
// writes and gathers: what is refused, and that nothing else is.
#include "fully_shard/params/shard_writes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr int64_t kWorld = 3;

PackedChunk chunk_of(int64_t rows, int64_t world) {
  return PackedLayout({ShardExtent{rows, 4}}, world).chunk(0);
}

std::vector<Holders> words_of(const std::vector<WriteRuns>& ranks) {
  std::vector<Holders> words;
  for (const auto& each : ranks) words.push_back(each.writing());
  return words;
}

void gather(std::vector<WriteRuns>& ranks) {
  const auto words = words_of(ranks);
  ASSERT_TRUE(WriteRuns::all_took_part(words));
  for (auto& each : ranks) each.compared(words);
}

// Parameters whose parts one, two and all ranks of three hold.
const std::vector<Holders> kParams = {holders_of(chunk_of(1, kWorld), {.inner_ranks = kWorld}),
                                      holders_of(chunk_of(2, kWorld), {.inner_ranks = kWorld}),
                                      holders_of(chunk_of(5, kWorld), {.inner_ranks = kWorld})};

TEST(WriteRuns, KnowsWhichRanksHoldAPart) {
  EXPECT_EQ(kParams, (std::vector<Holders>{0b001, 0b011, 0b111}));
  EXPECT_EQ(holders_of(chunk_of(0, kWorld), {.inner_ranks = kWorld}), 0u);
  EXPECT_EQ(holders_of(chunk_of(1, 1), {.inner_ranks = 1}), 0b1u);
  EXPECT_EQ(holders_of(chunk_of(64, 64), {.inner_ranks = 64}), ~Holders{0});
  EXPECT_EQ(holders_of(chunk_of(40, 64), {.inner_ranks = 64}),
            0xffu);  // ranks 0 to 7 share bits with 32 to 39
}

// Which of the parameters each rank writes in a run, as bits: all 8 * 8 * 8.
template <class Visit>
void for_every_run(const Visit& visit) {
  for (uint32_t a = 0; a < 8; ++a) {
    for (uint32_t b = 0; b < 8; ++b) {
      for (uint32_t c = 0; c < 8; ++c) visit(std::vector<uint32_t>{a, b, c});
    }
  }
}

void write(std::vector<WriteRuns>& ranks, const std::vector<uint32_t>& run) {
  for (size_t rank = 0; rank < run.size(); ++rank) {
    for (size_t param = 0; param < kParams.size(); ++param) {
      if ((run[rank] >> param & 1) != 0) ranks[rank].written(kParams[param]);
    }
  }
}

// A rank missed the run: it holds a part of something written, and wrote nothing.
bool somebody_missed(const std::vector<uint32_t>& run) {
  Holders held = 0;
  for (const auto written : run) {
    for (size_t param = 0; param < kParams.size(); ++param) {
      if ((written >> param & 1) != 0) held |= kParams[param];
    }
  }
  for (size_t rank = 0; rank < run.size(); ++rank) {
    if (run[rank] == 0 && (held >> rank & 1) != 0) return true;
  }
  return false;
}

TEST(WriteRuns, RefuseExactlyTheRunsThatARankMissed) {
  int64_t refused = 0;
  for_every_run([&](const std::vector<uint32_t>& run) {
    std::vector<WriteRuns> ranks(kWorld);
    write(ranks, run);
    EXPECT_EQ(WriteRuns::all_took_part(words_of(ranks)), !somebody_missed(run));
    refused += somebody_missed(run) ? 1 : 0;
  });
  EXPECT_GT(refused, 50);
}

// What is legal in one run leaves nothing behind that would be refused in the next.
TEST(WriteRuns, EveryLegalRunMayFollowEveryOther) {
  std::vector<WriteRuns> ranks(kWorld);
  for_every_run([&](const std::vector<uint32_t>& run) {
    if (somebody_missed(run)) return;
    write(ranks, run);
    gather(ranks);
    write(ranks, {7, 7, 7});
    gather(ranks);
    EXPECT_EQ(words_of(ranks), std::vector<Holders>(kWorld, 0));
  });
}

TEST(WriteRuns, OperatorsWithinARunAreNotCounted) {
  std::vector<WriteRuns> ranks(2);
  for (int i = 0; i < 3; ++i) ranks[0].written(0b11);
  ranks[1].written(0b11);
  EXPECT_EQ(ranks[0].writing(), ranks[1].writing());
  gather(ranks);
  EXPECT_EQ(ranks[0].describe(words_of(ranks), {0, 1}), "1 time on ranks 0, 1");
}

TEST(WriteRuns, AMissedRunStaysMissedUntilAllRanksWrite) {
  std::vector<WriteRuns> ranks(2);
  ranks[0].written(0b11);
  EXPECT_FALSE(WriteRuns::all_took_part(words_of(ranks)));
  EXPECT_FALSE(WriteRuns::all_took_part(words_of(ranks)));
  for (auto& each : ranks) each.written(0b11);
  gather(ranks);
}

TEST(WriteRuns, AreDescribedByCountAndRank) {
  std::vector<WriteRuns> ranks(3);
  for (auto& each : ranks) each.written(0b111);
  gather(ranks);
  ranks[0].written(0b111);
  ranks[2].written(0b111);
  for (const auto& each : ranks)
    EXPECT_EQ(each.describe(words_of(ranks), {4, 5, 6}), "2 times on ranks 4, 6; 1 time on rank 5");
}

}  // namespace
}  // namespace fsdp::internal
