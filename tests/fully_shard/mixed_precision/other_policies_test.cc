// Mixed precision beside the other policies of FSDP.
#include "fully_shard/auto_shard.h"
#include "fully_shard/wrap_policy.h"
#include "tests/fully_shard/support/mixed_precision.h"
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

struct NormBetweenImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    normed = norm(first(x));
    return last(normed);
  }
  torch::nn::Linear first = register_module("first", make_linear(4, 64));
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
  torch::nn::Linear last = register_module("last", make_linear(64, 2));
  torch::Tensor normed;
};

TEST(PrecisionBesidePolicies, InFullPrecisionLeavesNormalisationOut) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const auto dtypes = [&](const WrapPolicy& policy, const MixedPrecisionPolicy& precision) {
      const auto model = std::make_shared<NormBetweenImpl>();
      auto_shard(*model, policy, mesh, {.mp_policy = precision});
      const auto y = model->forward(torch::ones({3, 4}));
      const std::vector<at::ScalarType> before = {model->normed.scalar_type(), y.scalar_type()};
      y.sum().backward();
      EXPECT_EQ(DTensor(model->norm->parameters()[0].grad()).to_local().scalar_type(), at::kFloat);
      return before;
    };
    const auto linears = by_type<torch::nn::Linear>();
    const auto exempt = by_any({in_full_precision<torch::nn::LayerNorm>(), linears});
    const auto mixed = computing_in(at::kBFloat16);
    EXPECT_EQ(dtypes(linears, mixed), (std::vector{at::kBFloat16, at::kBFloat16}));
    EXPECT_EQ(dtypes(exempt, mixed), (std::vector{at::kFloat, at::kBFloat16}));
    EXPECT_EQ(dtypes(exempt, {}), (std::vector{at::kFloat, at::kFloat}));
  });
}

TEST(PrecisionBesidePolicies, InFullPrecisionIsGatheredInFloat) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const auto gathered_bytes = [&](const WrapPolicy& policy) {
      const auto model = std::make_shared<NormBetweenImpl>();
      auto_shard(*model, policy, mesh, {.mp_policy = computing_in(at::kBFloat16)});
      const auto before = counters(mesh).all_gather_bytes;
      model->forward(torch::ones({3, 4})).sum().backward();
      return counters(mesh).all_gather_bytes - before;
    };
    const auto layers = by_type<torch::nn::Linear, torch::nn::LayerNorm>();
    const auto exempt = by_any({in_full_precision<torch::nn::LayerNorm>(), layers});
    EXPECT_GE(gathered_bytes(exempt) - gathered_bytes(layers), 64 * 2);  // half the norm's in bf16
  });
}

}  // namespace
}  // namespace fsdp::testing
