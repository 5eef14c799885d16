#include "checkpoint/format/box.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::checkpoint::find_overlap;
using internal::checkpoint::intersect;
using internal::checkpoint::numel_of;

// Compared with all pairs.
TEST(Boxes, AnOverlapIsFoundWhereThereIsOne) {
  std::mt19937 random(2);
  int overlapping = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<internal::checkpoint::Box> boxes(2 + random() % 4);
    for (auto& box : boxes) {
      for (int dim = 0; dim < 2; ++dim) {
        box.push_back({int64_t(random() % 6), int64_t(random() % 4)});
      }
    }
    bool expected = false;
    for (size_t a = 0; a < boxes.size(); ++a) {
      for (size_t b = 0; b < a; ++b) expected |= numel_of(intersect(boxes[a], boxes[b])) > 0;
    }
    const auto found = find_overlap(boxes);
    EXPECT_EQ(found.has_value(), expected);
    if (found) {
      EXPECT_GT(numel_of(intersect(boxes[found->first], boxes[found->second])), 0);
    }
    overlapping += expected;
  }
  EXPECT_GT(overlapping, 300);  // both answers are asked for
  EXPECT_LT(overlapping, 2700);
  EXPECT_TRUE(find_overlap({{}, {}}).has_value());  // two of a tensor without dimensions
}

}  // namespace
}  // namespace fsdp::testing
