// What a training loop does with a model that is cut over "tp" and sharded over "dp".
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/grad.h"
#include "fully_shard/summon_full_params.h"
#include "tests/support/errors.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <limits>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

constexpr ShardedPair::Config kModel{
    .vocab = 67, .width = 20, .blocks = 2, .heads = 5, .kv_heads = 5, .max_tokens = 8};

void on_two_by_two(const std::function<void(ShardedPair&)>& body,
                   const FullyShardOptions& options = {}) {
  for (const bool cut_sequence : {false, true}) {
    SCOPED_TRACE(cut_sequence);
    on_pairs(kModel, 2, 2, cut_sequence, options, body);
  }
}

TEST(ShardedTraining, EntriesLieOnBothDimensionsCutByTheirStyleFirst) {
  on_two_by_two([](ShardedPair& pair) {
    const auto check = [&](const char* name, Placement by_style) {
      const auto& spec = internal::spec_of(pair.sharded->named_parameters()[name]);
      EXPECT_EQ(spec.mesh(), (pair.mesh[{"tp", "dp"}])) << name;
      EXPECT_EQ(spec.placements(), (std::vector<Placement>{by_style, Shard{0}})) << name;
    };
    check("embedding.weight", Shard{0});
    check("block0.attention.query.weight", Shard{0, 1, 4});
    check("block0.attention.output.weight", Shard{1, 1, 4});
    check("block1.mlp.down.weight", Shard{1});
    int64_t held = 0, all = 0;
    for (const auto& item : pair.sharded->named_parameters()) {
      EXPECT_EQ(DTensor(item.value()).device_mesh(), (pair.mesh[{"tp", "dp"}])) << item.key();
      held += DTensor(item.value()).to_local().numel();
      all += item.value().numel();
    }
    EXPECT_LE(held, all * 3 / 10);  // 5 heads, 67 rows and norms on two ranks
  });
}

TEST(ShardedTraining, GradientsOfSeveralBackwardsAddUp) {
  on_two_by_two([](ShardedPair& pair) {
    for (int batch = 0; batch < 3; ++batch) {
      std::optional<NoSyncGuard> no_sync;
      if (batch == 1) no_sync.emplace(get_fsdp_module(*pair.sharded));
      pair.backward();
      pair.text = pair.text.flip(2);
    }
    pair.expect_same_gradients();
  });
}

TEST(ShardedTraining, GradientsThatWaitInAnotherDtypeAddUp) {
  const FullyShardOptions options{.mp_policy = {.reduce_dtype = torch::kFloat32}};
  on_two_by_two(
      [](ShardedPair& pair) {
        for (int batch = 0; batch < 2; ++batch) {
          std::optional<NoSyncGuard> no_sync;
          if (batch == 0) no_sync.emplace(get_fsdp_module(*pair.sharded));
          pair.backward();
        }
        pair.expect_same_gradients(1e-5);
      },
      options);
}

// Of two bytes for each value, which is the same however a weight is cut.
TEST(ShardedTraining, CodesAreOfEachRanksPart) {
  auto codec = std::make_shared<GatherCodec>();
  codec->name = "two bytes";
  codec->row_bytes = [](int64_t elements) { return 2 * elements; };
  codec->encode = [](const at::Tensor& values, const at::Tensor& codes) {
    codes.copy_(values.to(at::kBFloat16).view(at::kByte));
  };
  codec->decode = [](const at::Tensor& codes, const at::Tensor& values) {
    values.copy_(codes.contiguous().view(at::kBFloat16));
  };
  const FullyShardOptions options{
      .gather_codec_fn = [&](const std::string&, const at::Tensor& weight) {
        return weight.dim() == 2 ? codec : nullptr;
      }};
  on_two_by_two(
      [](ShardedPair& pair) {
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : pair.plain->parameters())
            if (parameter.dim() == 2) parameter.copy_(parameter.to(at::kBFloat16));
        }
        pair.backward();
        pair.expect_same_gradients();
      },
      options);
}

TEST(ShardedTraining, AGraphThatIsKeptGivesItsGradientsAgain) {
  on_two_by_two([](ShardedPair& pair) {
    const at::Tensor wanted = pair.plain_loss(), found = pair.sharded_loss();
    for (int pass = 0; pass < 2; ++pass) {
      wanted.backward({}, /*retain_graph=*/true);
      found.backward({}, /*retain_graph=*/true);
    }
    pair.expect_same_gradients();
  });
}

TEST(ShardedTraining, FrozenParametersHaveNoGradients) {
  on_two_by_two([](ShardedPair& pair) {
    for (auto& model : {pair.plain, pair.sharded}) {
      for (const char* name :
           {"embedding.weight", "block0.attention.query.weight", "block1.mlp_norm.weight"})
        model->named_parameters()[name].requires_grad_(false);
    }
    pair.backward();
    pair.expect_same_gradients();
    for (auto model : {pair.plain, pair.sharded}) {
      model->zero_grad();
      model->named_parameters()["block1.mlp_norm.weight"].requires_grad_(true);
    }
    pair.backward();
    pair.expect_same_gradients();
  });
}

TEST(ShardedTraining, ClippingIsByTheNormOfOneDevice) {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    on_two_by_two([p](ShardedPair& pair) {
      pair.backward();
      const double wanted = torch::nn::utils::clip_grad_norm_(pair.plain->parameters(), 1e-2, p);
      const at::Tensor found = clip_grad_norm_(pair.sharded->parameters(), 1e-2, p);
      EXPECT_GT(wanted, 1e-2);
      EXPECT_NEAR(found.item<double>() / wanted, 1, 1e-11);
      pair.expect_same_gradients();
    });
  }
}

TEST(ShardedTraining, RegionsThatRunAgainInBackward) {
  on_two_by_two([](ShardedPair& pair) {
    pair.sharded->around_block = [](const auto& run, const at::Tensor& x) {
      return checkpoint(run, x);
    };
    pair.sharded_loss().backward();
    pair.plain_loss().backward();
    pair.expect_same_gradients();
  });
}

TEST(ShardedTraining, SummonedParametersAreWholeOverTheDataRanks) {
  on_two_by_two([](ShardedPair& pair) {
    {
      const SummonFullParams full(pair.sharded);
      for (const auto& item : pair.sharded->named_parameters()) {
        const at::Tensor wanted = pair.plain->named_parameters()[item.key()].detach();
        EXPECT_TRUE(full_value(item.value()).equal(wanted)) << item.key();
        if (!is_dtensor(item.value())) continue;
        EXPECT_EQ(DTensor(item.value()).device_mesh(), pair.mesh["tp"]) << item.key();
      }
      const torch::NoGradGuard no_grad;
      pair.sharded->named_parameters()["block0.mlp.up.weight"].mul_(2);
    }
    const torch::NoGradGuard no_grad;
    pair.plain->named_parameters()["block0.mlp.up.weight"].mul_(2);
    pair.expect_same_values(0);
  });
}

TEST(ShardedTraining, GradientsAsValues) {
  on_two_by_two([](ShardedPair& pair) {
    const auto names = pair.plain->named_parameters();
    const at::Tensor text = pair.text[pair.data_rank()];
    const auto wanted =
        torch::autograd::grad({ShardedPair::loss(pair.plain, text)}, pair.plain->parameters());
    const auto found = grad({pair.sharded_loss()}, pair.sharded->parameters());
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_LE(distance(full_value(found[i]), wanted[i]), kClose) << names[i].key();
  });
}

TEST(ShardedTraining, WhatIsWrittenToAMemberReachesItsEntry) {
  on_two_by_two([](ShardedPair& pair) {
    const torch::NoGradGuard no_grad;
    pair.plain->blocks[0]->mlp->up->weight.add_(1);
    pair.sharded->blocks[0]->mlp->up->weight.add_(1);
    pair.plain->named_parameters()["head.weight"].copy_(torch::ones_like(pair.plain->head->weight));
    pair.sharded->named_parameters()["head.weight"].copy_(
        torch::ones_like(pair.plain->head->weight));
    pair.expect_same_values(1e-15);
    EXPECT_LE(distance(full_tensor(pair.sharded->forward(pair.text[0])),
                       pair.plain->forward(pair.text[0])),
              kClose);
  });
}

TEST(ShardedTraining, TheLikeliestTokensAreThoseOfOneDevice) {
  on_two_by_two([](ShardedPair& pair) {
    const at::Tensor prompt = torch::tensor({3, 1, 4});
    const at::Tensor wanted = pair.plain->generate(prompt, 4, /*temperature=*/0);
    EXPECT_TRUE(full_tensor(pair.sharded->generate(prompt, 4, /*temperature=*/0)).equal(wanted));
  });
}

TEST(ShardedTraining, ActivationsAreCastBeforeTheyMove) {
  const FullyShardOptions options{
      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32}};
  on_two_by_two(
      [](ShardedPair& pair) {
        const at::Tensor logits = pair.sharded->forward(pair.text[0]);
        EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
        EXPECT_LE(
            distance(full_tensor(logits).to(torch::kFloat64), pair.plain->forward(pair.text[0])),
            0.05);
        pair.backward();
        pair.expect_same_gradients(0.1);
      },
      options);
}

class HybridTraining : public ::testing::TestWithParam<std::tuple<std::vector<int64_t>, Outer>> {};

TEST_P(HybridTraining, EqualsOneDevice) {
  const auto& [shape, outer] = GetParam();
  FullyShardOptions options;
  options.outer = outer;
  for (const bool cut_sequence : {false, true}) {
    run_ranks(shape[0] * shape[1] * shape[2], [&](int64_t) {
      ShardedPair pair(kModel, init_device_mesh(c10::kCPU, shape, {"replicate", "dp", "tp"}),
                       cut_sequence, options);
      pair.backward();
      pair.expect_same_gradients();
      const double wanted = torch::nn::utils::clip_grad_norm_(pair.plain->parameters(), 1e-2);
      const at::Tensor found = clip_grad_norm_(pair.sharded->parameters(), 1e-2);
      EXPECT_NEAR(found.item<double>() / wanted, 1, 1e-11);
    });
  }
}

TEST_P(HybridTraining, StepsAsOneDevice) {
  const auto& [shape, outer] = GetParam();
  FullyShardOptions options;
  options.outer = outer;
  run_ranks(shape[0] * shape[1] * shape[2], [&](int64_t) {
    ShardedPair pair(kModel, init_device_mesh(c10::kCPU, shape, {"replicate", "dp", "tp"}),
                     /*cut_sequence=*/true, options);
    pair.expect_same_steps(3);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, HybridTraining,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2, 1, 2},
                                                              std::vector<int64_t>{1, 2, 2},
                                                              std::vector<int64_t>{2, 2, 2}),
                                            ::testing::Values(Outer::kReplicate,
                                                              Outer::kShardOptimizer)));

TEST(ShardedMemberErrors, AMeshThatIsNotBesideTheMembersIsRefused) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"dp", "tp"});
    auto model = drawn(1, [] { return torch::nn::Linear(4, 6); });
    parallelize_module(model, mesh["tp"], {{"", ColwiseParallel{}}});
    const auto refused = AllOf(HasSubstr("parameter 'weight'"), HasSubstr("tensor-parallel"),
                               HasSubstr("different dimensions of one mesh"));
    expect_error<c10::ValueError>([&] { fully_shard(model, mesh["tp"]); }, refused);
    expect_error<c10::ValueError>([&] { fully_shard(model, default_mesh()); }, refused);
    fully_shard(model, mesh["dp"]);
    EXPECT_TRUE(is_fsdp_module(*model));
  });
}

TEST(ShardedMemberErrors, AfterAForwardThatThrewTheNextStepIsRight) {
  on_two_by_two([](ShardedPair& pair) {
    EXPECT_THROW(pair.sharded->forward(torch::full({1, 3}, 1000)), c10::Error);
    pair.backward();
    pair.expect_same_gradients();
  });
}

}  // namespace
}  // namespace fsdp::testing
