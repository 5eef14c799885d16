// Switches that take `recurse`: true is for the units below too, false for the unit
// alone.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class RecursionEffects : public Worlds {};

// Of the root alone, unsharded.
int64_t root_bytes(MeasuredDecoder& decoder) {
  decoder.root().unshard();
  const auto bytes = decoder.resident_bytes();
  decoder.root().reshard();
  return bytes;
}

int64_t reductions_of(MeasuredDecoder& decoder) {
  decoder.forward();
  return decoder.backward().reduce_scatters;
}

TEST_P(RecursionEffects, ReshardAfterForwardOfTheRootAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.root().set_reshard_after_forward(false, /*recurse=*/false);
    EXPECT_EQ(decoder.step().all_gathers, MeasuredDecoder::kStepGathers);
    decoder.root().set_reshard_after_forward(false, /*recurse=*/true);
    EXPECT_EQ(decoder.step().all_gathers, kUnits);
  });
}

TEST_P(RecursionEffects, ReshardAfterBackwardOfTheRootAlone) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    const auto root = root_bytes(decoder);
    EXPECT_GT(root, 0);
    decoder.root().set_reshard_after_backward(false, /*recurse=*/false);
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(decoder.resident_bytes(), root);
    decoder.root().set_reshard_after_backward(false, /*recurse=*/true);
    decoder.forward();
    decoder.backward();
    EXPECT_GT(decoder.resident_bytes(), 2 * root);
  });
}

TEST_P(RecursionEffects, GradientSyncOfTheRootAloneAndOfAll) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.root().set_requires_gradient_sync(false, /*recurse=*/false);
    EXPECT_EQ(reductions_of(decoder), kUnits - 1);
    decoder.root().set_requires_gradient_sync(false, /*recurse=*/true);
    EXPECT_EQ(reductions_of(decoder), 0);
    decoder.root().set_requires_gradient_sync(true, /*recurse=*/false);
    EXPECT_EQ(reductions_of(decoder), 1);
    decoder.root().set_requires_gradient_sync(true, /*recurse=*/true);
    EXPECT_EQ(reductions_of(decoder), kUnits);
  });
}

TEST_P(RecursionEffects, PendingGradientsOfTheRootAloneAndOfAll) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    int64_t all = 0, own = 0;
    for (const auto& parameter : decoder.model->parameters()) all += 4 * parameter.numel();
    for (const auto& parameter : decoder.model->norm->parameters()) own += 4 * parameter.numel();
    const NoSyncGuard guard(decoder.root());
    decoder.forward();
    decoder.backward();
    EXPECT_EQ(counters(mesh).gradient_bytes, all);
    decoder.root().zero_pending_gradients(/*recurse=*/false);
    EXPECT_EQ(counters(mesh).gradient_bytes, all - own);
    decoder.root().zero_pending_gradients(/*recurse=*/true);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

INSTANTIATE_WORLDS(RecursionEffects, 2, 3);

TEST(RecursionOverReplicas, AllReduceOfTheRootAloneAndOfAll) {
  run_ranks(4, [](int64_t) {
    MeasuredDecoder decoder(init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"}));
    const auto all_reduces = [&decoder] {
      decoder.forward();
      return decoder.backward().all_reduces;
    };
    decoder.root().set_requires_all_reduce(false, /*recurse=*/false);
    EXPECT_EQ(all_reduces(), kUnits - 1);
    decoder.root().set_requires_all_reduce(false, /*recurse=*/true);
    EXPECT_EQ(all_reduces(), 0);
    decoder.root().set_requires_all_reduce(true, /*recurse=*/false);
    EXPECT_EQ(all_reduces(), 1);
    decoder.root().set_requires_all_reduce(true, /*recurse=*/true);
    EXPECT_EQ(all_reduces(), kUnits);
  });
}

}  // namespace
}  // namespace fsdp::testing
