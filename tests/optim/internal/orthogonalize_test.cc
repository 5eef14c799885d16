// Several buckets: each is one exchange there and one back, and the values are those of
// one bucket.
#include "optim/internal/orthogonalize.h"

#include "dtensor/dtensor.h"
#include "optim/muon.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <vector>

namespace fsdp::internal {
namespace {

using testing::full_value;
using testing::on_ranks_of;
using testing::values_of;

const std::vector<std::vector<int64_t>> kManyShapes = {{8, 8}, {5, 7}, {3, 9}, {6, 6},
                                                       {4, 4}, {2, 5}, {9, 2}};

// The directions of tensors of those shapes, whole, and in `counters` how they came.
template <class Place>
std::vector<at::Tensor> directions(const Place& place, int64_t bucket_bytes,
                                   MuonCounters& counters) {
  std::vector<ToOrthogonalize> items;
  for (size_t i = 0; i < kManyShapes.size(); ++i)
    items.push_back({place(values_of(kManyShapes[i], static_cast<double>(i))), {}, {}});
  std::vector<at::Tensor> results(items.size());
  std::vector<int64_t> asked(items.size(), 0);
  orthogonalize(
      items,
      [&](size_t i) {
        ++asked[i];
        return items[i].like;
      },
      [&](size_t i, const at::Tensor& direction) {
        EXPECT_FALSE(results[i].defined()) << "twice";
        results[i] = direction;
      },
      counters, bucket_bytes);
  EXPECT_EQ(asked, std::vector<int64_t>(items.size(), 1));
  for (auto& result : results) result = full_value(result);
  return results;
}

TEST(Orthogonalize, InBucketsOfAnySizeGivesTheSame) {
  MuonCounters of_plain;
  const auto expected =
      directions([](const at::Tensor& whole) { return whole; }, kBucketBytes, of_plain);
  for (const int64_t world : {2, 3, 4}) {
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      const auto place = [&](const at::Tensor& whole) -> at::Tensor {
        return distribute_tensor(whole, mesh, {Shard{0}});
      };
      // Of bf16: 128, 70, 54, 72, 32, 20 and 36 bytes.
      for (const auto& [bucket_bytes, buckets] :
           std::vector<std::pair<int64_t, int64_t>>{{kBucketBytes, 1}, {200, 3}, {1, 7}}) {
        MuonCounters counters;
        const auto results = directions(place, bucket_bytes, counters);
        EXPECT_EQ(counters.exchanges, 2 * buckets);
        for (size_t i = 0; i < results.size(); ++i)
          EXPECT_TRUE(at::equal(results[i], expected[i]))
              << "tensor " << i << ", buckets of " << bucket_bytes;
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::internal
