// Reductions of units that run in regions of fsdp::checkpoint, behind others that do not.
#include "fully_shard/activation_checkpoint.h"
#include "tests/fully_shard/effects/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class CheckpointedReductions : public Worlds {};

// The embedding is used first and its gradient comes last; the blocks between it and the
// head are in regions of `blocks_per_region`.
Tensor loss_in_regions(Decoder& model, const Data& data, size_t blocks_per_region) {
  auto x = model->embedding(data.index);
  for (size_t first = 0; first < model->blocks.size(); first += blocks_per_region) {
    const auto region = [&model, first, blocks_per_region](const Tensor& input) {
      auto y = input;
      for (size_t i = first; i < first + blocks_per_region; ++i) y = model->blocks.at(i)(y);
      return y;
    };
    x = checkpoint(region, x);
  }
  return model->head(model->norm(x)).pow(2).mean();
}

// So every unit is reduced exactly once: there are as many reductions as units, and no
// gradient is missing or wrong.
TEST_P(CheckpointedReductions, LeaveOncePerUnitAndStepAndNoneIsLate) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto mine = make_data(20 + static_cast<uint64_t>(rank));
    for (const size_t blocks_per_region : {1, 2}) {
      MeasuredDecoder plain(mesh), saving(mesh);
      for (int step = 0; step < 3; ++step) {
        SCOPED_TRACE(c10::str(blocks_per_region, " blocks per region, step ", step));
        loss_of(plain.model, mine).backward();
        const auto before = counters(mesh);
        loss_in_regions(saving.model, mine, blocks_per_region).backward();
        const auto after = counters(mesh);
        EXPECT_EQ(after.reduce_scatters - before.reduce_scatters, kUnits);
        EXPECT_EQ(after.late_reduce_scatters - before.late_reduce_scatters, 0);
        EXPECT_EQ(after.gradient_bytes, 0);
        EXPECT_EQ(after.unsharded_bytes, 0);
        const auto expected = plain.model->parameters(), actual = saving.model->parameters();
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_TRUE(actual[i].grad().defined()) << i;
          EXPECT_TRUE(torch::equal(full_gradient(actual[i]), full_gradient(expected[i]))) << i;
        }
        plain.update();
        saving.update();
      }
    }
  });
}

INSTANTIATE_WORLDS(CheckpointedReductions, 2, 3);

}  // namespace
}  // namespace fsdp::testing
