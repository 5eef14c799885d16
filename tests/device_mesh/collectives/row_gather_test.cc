#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/process_group.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace fsdp::internal {
namespace {

using testing::run_ranks;

// What each rank sends is its number + 1.
void expect_gathered(int64_t world, const std::vector<int64_t>& lengths) {
  constexpr int64_t kBytes = 40;
  run_ranks(world, [&](int64_t rank) {
    const auto row = at::full({kBytes}, rank + 1, at::kByte);
    RowGather gather(default_process_group(), row, lengths, /*tag=*/5);
    gather.wait("gather");
    int64_t received = 0;
    for (int64_t r = 0; r < world; ++r) {
      const auto length = lengths.empty() ? kBytes : lengths[static_cast<size_t>(r)];
      const auto* const first = gather.row(r);
      EXPECT_TRUE(std::all_of(first, first + length, [r](char byte) { return byte == r + 1; }));
      if (r != rank) received += length;
    }
    EXPECT_EQ(gather.staging_bytes(), received);
  });
}

TEST(RowGather, BringsTheRowsOfAllRanks) {
  for (const int64_t world : {1, 2, 3, 4}) expect_gathered(world, {});
}

TEST(RowGather, TakesMemoryForTheBeginningsThatAreSentOnly) {
  for (const int64_t world : {1, 2, 3, 4}) {
    std::vector<int64_t> lengths(static_cast<size_t>(world));
    std::iota(lengths.begin(), lengths.end(), 0);
    expect_gathered(world, lengths);
    std::reverse(lengths.begin(), lengths.end());
    expect_gathered(world, lengths);
    expect_gathered(world, std::vector<int64_t>(static_cast<size_t>(world), 0));
  }
}

}  // namespace
}  // namespace fsdp::internal
