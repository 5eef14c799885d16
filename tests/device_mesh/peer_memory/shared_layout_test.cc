#include "device_mesh/peer_memory/shared_layout.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace fsdp::internal {
namespace {

TEST(BlockPlaces, RoundsUpByLessThanAQuarter) {
  for (uint64_t bytes = 0; bytes < (1 << 16); ++bytes) {
    const auto rounded = BlockPlaces::rounded(bytes);
    ASSERT_GE(rounded, bytes);
    ASSERT_LE(rounded, bytes + bytes / 4 + 64) << bytes;
    ASSERT_EQ(rounded % 64, 0) << bytes;
    ASSERT_EQ(BlockPlaces::rounded(rounded), rounded) << bytes;
  }
}

TEST(BlockPlaces, HasNothingBeforeThereIsASegment) {
  BlockPlaces places;
  EXPECT_FALSE(places.take(1));
  places.add_segment(0, 64, 64 + 192);
  EXPECT_FALSE(places.take(193));
  EXPECT_EQ(places.take(192), BlockRef(0, 64));
  EXPECT_FALSE(places.take(1));
}

TEST(BlockPlaces, WhatWasGivenBackIsTakenAgainForTheSameSize) {
  BlockPlaces places;
  places.add_segment(0, 64, 4096);
  const auto first = places.take(1000), second = places.take(1000);
  ASSERT_TRUE(first && second);
  places.give_back(first, 1000);
  EXPECT_EQ(places.take(1001), first) << "of the same rounded size";
  places.give_back(second, 1000);
  EXPECT_NE(places.take(64), second);
  EXPECT_EQ(places.take(1000), second);
}

// Against a list of what is taken.
TEST(BlockPlaces, BlocksThatAreTakenNeverOverlap) {
  std::mt19937 random(7);
  BlockPlaces places;
  uint64_t segments = 0, ends[64] = {};
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> taken;  // bytes by place
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0 && !taken.empty()) {
      const auto which = std::next(taken.begin(), random() % taken.size());
      places.give_back({which->first.first, which->first.second}, which->second);
      taken.erase(which);
      continue;
    }
    const uint64_t bytes = random() % (1u << random() % 14);
    auto place = places.take(bytes);
    if (!place) {
      ASSERT_LT(segments, 64);
      ends[segments] = 64 + BlockPlaces::rounded(bytes) + random() % 65536;
      places.add_segment(static_cast<uint32_t>(segments), 64, ends[segments]);
      ++segments;
      place = places.take(bytes);
    }
    ASSERT_TRUE(place);
    ASSERT_EQ(place.offset() % 64, 0);
    ASSERT_LE(place.offset() + bytes, ends[place.segment()]);
    const auto after = taken.lower_bound({place.segment(), place.offset()});
    if (after != taken.end() && after->first.first == place.segment()) {
      ASSERT_LE(place.offset() + std::max<uint64_t>(bytes, 1), after->first.second);
    }
    if (after != taken.begin()) {
      const auto before = std::prev(after);
      if (before->first.first == place.segment()) {
        ASSERT_GE(place.offset(), before->first.second + std::max<uint64_t>(before->second, 1));
      }
    }
    taken[{place.segment(), place.offset()}] = bytes;
  }
}

}  // namespace
}  // namespace fsdp::internal
