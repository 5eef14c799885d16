// Mixed precision: writes to members, and full parameters, which are in the dtype of the
// shards.
#include "tests/fully_shard/precision/mixed_precision.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class FullPrecision : public Worlds {};

TEST_P(FullPrecision, WritesToMembersReachTheShards) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    {
      torch::NoGradGuard no_grad;
      model->first->weight.fill_(1.0 / 3);
    }
    const auto rounded = torch::full({6, 4}, 1.0 / 3).to(at::kBFloat16).to(at::kFloat);
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(rounded));
    EXPECT_TRUE(model->first->weight.detach().to(at::kFloat).equal(rounded));
  });
}

TEST_P(FullPrecision, SummonedParametersAreThoseOfTheShardsAndLoseNothing) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    const Pair plain(4, 6, 3);
    model(input_of(rank)).sum().backward();
    {
      SummonFullParams full(model, {.with_grads = true});
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_TRUE(model->parameters()[i].equal(plain->parameters()[i])) << i;
        EXPECT_EQ(model->parameters()[i].grad().sizes(), plain->parameters()[i].sizes());
      }
      torch::NoGradGuard no_grad;
      model->second->named_parameters()["bias"].fill_(1.0 / 3);
    }
    for (size_t i = 0; i + 1 < plain->parameters().size(); ++i)
      EXPECT_TRUE(full_value(model->parameters()[i]).equal(plain->parameters()[i])) << i;
    EXPECT_TRUE(full_value(model->parameters()[3]).equal(torch::full({3}, 1.0 / 3)));
    int64_t seen = 0;
    for_each_full_param(*model, [&](const std::string&, const Tensor& value) {
      EXPECT_EQ(value.scalar_type(), at::kFloat);
      ++seen;
    });
    EXPECT_EQ(seen, 4);
  });
}

// apply_unsharded with reset_parameters() writes members; named_parameters() gives
// copies.
TEST_P(FullPrecision, WritesToMembersWhileCopiesAreShownPersist) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    apply_unsharded(*model, [](torch::nn::Module& module) {
      torch::NoGradGuard no_grad;
      if (auto* linear = module.as<torch::nn::LinearImpl>()) {
        linear->weight.fill_(0.5);
        linear->named_parameters()["bias"].fill_(1.0 / 3);
      }
    });
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(torch::full({6, 4}, 0.5)));
    EXPECT_TRUE(full_value(model->parameters()[1]).equal(torch::full({6}, 1.0 / 3)));
  });
}

INSTANTIATE_WORLDS(FullPrecision, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
