// Mixed precision beside the other policies of FSDP.
#include "tests/fully_shard/precision/mixed_precision.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

TEST(PrecisionBesidePolicies, KeepsPartsForNeighboursInParamDtype) {
  on_ranks_of(4, [](int64_t rank, const DeviceMesh& mesh) {
    const auto kept_bytes = [&](const MixedPrecisionPolicy& policy) {
      auto linear = large_linear();
      fully_shard(linear, mesh,
                  {.reshard_after_forward = ReshardAfterForward::to_world(2), .mp_policy = policy});
      auto after = make_linear(48, 2);  // ends the turn of the one before
      fully_shard(after, mesh);
      const auto y = after(linear(torch::ones({1, 64})).to(at::kFloat));
      return counters(mesh).post_forward_bytes;
    };
    EXPECT_GT(kept_bytes({}), 0);
    EXPECT_EQ(2 * kept_bytes(computing_in(at::kBFloat16)), kept_bytes({}));
    auto model = sharded(mesh, computing_in(at::kBFloat16), ReshardAfterForward::to_world(2));
    model(input_of(rank)).pow(2).sum().backward();
    const auto expected = mean_gradients(*Pair(4, 6, 3), 4, at::kBFloat16, at::kBFloat16);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(full_gradient(model->parameters()[i]), expected[i], 4);
  });
}

TEST(PrecisionBesidePolicies, ReducesOverReplicasInFloat) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    model(input_of(rank)).pow(2).sum().backward();
    const auto expected = mean_gradients(*Pair(4, 6, 3), 4, at::kBFloat16, at::kBFloat16);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(full_gradient(model->parameters()[i]), expected[i], 4);
  });
}

}  // namespace
}  // namespace fsdp::testing
