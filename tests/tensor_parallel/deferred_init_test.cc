// Tensor-parallel models that are built without values: parallelize_module takes them,
// and each rank computes its part of what the model built at once would have.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/put_on_meta.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <gmock/gmock.h>

#include <tuple>

namespace fsdp::testing {
namespace {

using programs::Transformer;
using ::testing::AllOf;
using ::testing::HasSubstr;

const ShardedPair::Config kDeferredModel{
    .vocab = 30, .width = 18, .blocks = 2, .heads = 3, .kv_heads = 3, .max_tokens = 8};
constexpr int64_t kDeferredHead = 6;

Transformer build_transformer() { return Transformer(kDeferredModel); }

Transformer built_deferred(uint64_t seed) {
  return drawn(seed, [] { return deferred_init(build_transformer); });
}

void expect_same_values(torch::nn::Module& found, torch::nn::Module& wanted) {
  const auto values = wanted.named_parameters();
  for (const auto& item : found.named_parameters()) {
    EXPECT_TRUE(full_value(item.value()).equal(values[item.key()].detach())) << item.key();
    EXPECT_EQ(item.value().device(), values[item.key()].device()) << item.key();
  }
}

class DeferredTensorParallel : public Worlds {};

TEST_P(DeferredTensorParallel, HasTheValuesOfTheModelBuiltAtOnce) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(3, build_transformer), deferred = built_deferred(3);
    parallelize_module(deferred, mesh, transformer_plan(kDeferredHead, /*cut_sequence=*/false));
    for (const auto& item : deferred->named_parameters()) {
      EXPECT_TRUE(item.value().is_meta()) << item.key();
      EXPECT_EQ(item.value().sizes(), plain->named_parameters()[item.key()].sizes()) << item.key();
    }
    materialize(*deferred);
    expect_same_values(*deferred, *plain);
    for (const auto& item : deferred->named_parameters()) {
      if (!is_dtensor(item.value())) continue;
      const at::Tensor part = DTensor(item.value()).to_local();
      EXPECT_EQ(part.storage().nbytes(), part.nbytes()) << item.key() << ": holds the whole";
    }
  });
}

TEST_P(DeferredTensorParallel, TrainsAsTheModelBuiltAtOnceWithAnOptimizerFromBefore) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto at_once = drawn(3, build_transformer), deferred = built_deferred(3);
    const auto plan = transformer_plan(kDeferredHead, /*cut_sequence=*/true);
    for (Transformer* model : {&at_once, &deferred}) parallelize_module(*model, mesh, plan);
    torch::optim::AdamW known(at_once->parameters(), {1e-2}), early(deferred->parameters(), {1e-2});
    materialize(*deferred);
    const auto text = torch::arange(12).view({2, 6});
    for (int64_t step = 0; step < 2; ++step) {
      for (auto [model, optimizer] : {std::tie(at_once, known), std::tie(deferred, early)}) {
        ShardedPair::loss(model, text).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    const auto wanted = at_once->named_parameters();
    for (const auto& item : deferred->named_parameters())
      EXPECT_TRUE(full_value(item.value()).equal(full_value(wanted[item.key()]))) << item.key();
  });
}

INSTANTIATE_WORLDS(DeferredTensorParallel, 1, 2, 3);

TEST(DeferredTensorParallelAndSharded, HasTheValuesAndGradientsOfOneDevice) {
  for (const auto& [dp, tp] : {std::tuple(2, 2), std::tuple(1, 3), std::tuple(2, 1)}) {
    run_ranks(dp * tp, [dp = dp, tp = tp](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
      auto plain = drawn(3, build_transformer), deferred = built_deferred(3);
      parallelize_module(deferred, mesh["tp"], transformer_plan(kDeferredHead, true));
      for (auto& block : deferred->blocks) fully_shard(*block, mesh["dp"]);
      fully_shard(*deferred, mesh["dp"]);
      for (const auto& parameter : deferred->parameters()) EXPECT_TRUE(parameter.is_meta());
      materialize(*deferred);
      expect_same_values(*deferred, *plain);
      const auto text = torch::arange(12).view({2, 6});
      ShardedPair::loss(plain, text).backward();
      ShardedPair::loss(deferred, text).backward();
      testing::expect_same_gradients(*deferred, *plain, kClose);
    });
  }
}

TEST_P(DeferredTensorParallel, RanksThatDrewOtherValuesAreToldApart) {
  if (world() == 1) return;
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto deferred = built_deferred(static_cast<uint64_t>(rank));
    expect_error<c10::ValueError>(
        [&] { parallelize_module(deferred, mesh, transformer_plan(kDeferredHead, false)); },
        AllOf(HasSubstr("embedding.weight"), HasSubstr("rank")));
    for (const auto& parameter : deferred->parameters()) EXPECT_FALSE(is_dtensor(parameter));
  });
}

TEST_P(DeferredTensorParallel, UsingOrWritingAMemberWithoutValuesIsRefusedByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto deferred = built_deferred(3);
    parallelize_module(deferred, mesh, transformer_plan(kDeferredHead, false));
    const auto names_it = AllOf(HasSubstr("embedding.weight"), HasSubstr("materialize"));
    expect_error<c10::ValueError>(
        [&] {
          deferred->forward(torch::zeros({1, 2}, torch::kLong));
        },
        names_it);
    const torch::NoGradGuard no_grad;
    const auto weight = deferred->named_parameters()["embedding.weight"];
    expect_error<c10::ValueError>([&] { weight.zero_(); }, names_it);
    expect_error<c10::ValueError>([&] { weight.sum(); }, names_it);
    materialize(*deferred);
    EXPECT_GT(weight.abs().sum().item<double>(), 0);
  });
}

// Shapes only: nothing was recorded.
TEST_P(DeferredTensorParallel, ModulesOfTheMetaDeviceAreInitialisedModuleByModule) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential mlp(torch::nn::Linear(6, 5), torch::nn::GELU(), torch::nn::Linear(5, 6));
    put_on_meta(*mlp);
    parallelize_module(*mlp, mesh, {{"0", ColwiseParallel{}}, {"2", RowwiseParallel{}}});
    expect_error<c10::ValueError>([&] { materialize(*mlp); }, HasSubstr("initialise"));
    materialize(*mlp, [](torch::nn::Module& module) {
      if (auto* const linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::constant_(linear->weight, 2);
        torch::nn::init::zeros_(linear->bias);
      }
    });
    EXPECT_TRUE(full_value(mlp->parameters()[0]).equal(torch::full({5, 6}, 2.0)));
    EXPECT_TRUE(full_value(mlp->parameters()[1]).equal(torch::zeros({5})));
    EXPECT_EQ(mlp->forward(torch::ones({1, 6})).sizes(), c10::IntArrayRef({1, 6}));
  });
}

}  // namespace
}  // namespace fsdp::testing
