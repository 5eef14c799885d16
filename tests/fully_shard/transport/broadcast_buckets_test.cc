#include "fully_shard/transport/broadcast_buckets.h"

#include <gtest/gtest.h>

#include <utility>

namespace fsdp::internal {
namespace {

// All lists of up to four tensors of 0 to 5 bytes, in buckets of 1 to 8.
template <class Visit>
void for_all_buckets(const Visit& visit) {
  std::vector<std::vector<int64_t>> lists = {{}};
  for (size_t done = 0; lists[done].size() < 4; ++done) {
    for (int64_t bytes = 0; bytes <= 5; ++bytes) {
      auto longer = lists[done];
      longer.push_back(bytes);
      lists.push_back(std::move(longer));
    }
  }
  for (const auto& nbytes : lists) {
    for (int64_t limit = 1; limit <= 8; ++limit)
      visit(nbytes, limit, broadcast_buckets(nbytes, limit));
  }
}

TEST(BroadcastBuckets, HoldEveryByteOnceInOrder) {
  for_all_buckets([](const auto& nbytes, int64_t, const auto& buckets) {
    std::vector<int64_t> met(nbytes.size());
    size_t last = 0;
    for (const auto& bucket : buckets) {
      for (const auto& piece : bucket) {
        ASSERT_LT(piece.tensor, nbytes.size());
        EXPECT_GE(piece.tensor, last);
        EXPECT_GT(piece.bytes, 0);
        EXPECT_EQ(piece.offset, met[piece.tensor]);
        met[piece.tensor] += piece.bytes;
        last = piece.tensor;
      }
    }
    EXPECT_EQ(met, nbytes);
  });
}

TEST(BroadcastBuckets, AreFullButForTheLast) {
  for_all_buckets([](const auto&, int64_t limit, const auto& buckets) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      int64_t bytes = 0;
      for (const auto& piece : buckets[i]) bytes += piece.bytes;
      const bool is_last = i + 1 == buckets.size();
      EXPECT_LE(bytes, limit);
      EXPECT_GE(bytes, is_last ? 1 : limit);
    }
  });
}

}  // namespace
}  // namespace fsdp::internal
