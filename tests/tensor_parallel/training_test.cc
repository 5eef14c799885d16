// What a training loop does with a tensor-parallel model, beside one device.
#include "dtensor/dtensor.h"
#include "programs/trainer/model/transformer.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/transformer_plan.h"

namespace fsdp::testing {
namespace {

using programs::Transformer;

constexpr programs::TransformerConfig kConfig{
    .vocab = 67, .width = 24, .blocks = 2, .heads = 3, .kv_heads = 3, .max_tokens = 8};
constexpr int64_t kHeadWidth = 8;

class TensorParallelTraining : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {
 protected:
  struct Pair {
    Transformer plain, parallel;
    at::Tensor tokens = torch::arange(10).view({2, 5}) * 7 % kConfig.vocab;

    at::Tensor plain_loss() { return transformer_loss(plain->forward(tokens), tokens); }
    at::Tensor parallel_loss() { return transformer_loss(parallel->forward(tokens), tokens); }
    void expect_same(double tolerance) { expect_same_gradients(*parallel, *plain, tolerance); }
  };

  void on_pairs(const std::function<void(Pair&)>& body) {
    on_ranks_of(std::get<0>(GetParam()), [&](int64_t, const DeviceMesh& mesh) {
      const auto make = [] { return Transformer(kConfig); };
      Pair pair{drawn(3, make), drawn(3, make)};
      parallelize_module(pair.parallel, mesh,
                         transformer_plan(kHeadWidth, std::get<1>(GetParam())));
      body(pair);
    });
  }
};

TEST_P(TensorParallelTraining, ThreeStepsOfAdamW) {
  on_pairs([](Pair& pair) {
    expect_same_adamw_steps(*pair.parallel, *pair.plain, 3, [&](int) {
      pair.plain_loss().backward();
      pair.parallel_loss().backward();
    });
  });
}

TEST_P(TensorParallelTraining, GradientsOfTwoBackwardsAddUp) {
  on_pairs([](Pair& pair) {
    for (int batch = 0; batch < 2; ++batch) {
      pair.plain_loss().backward();
      pair.parallel_loss().backward();
      pair.tokens = pair.tokens.flip(1);
    }
    pair.expect_same(kClose);
  });
}

TEST_P(TensorParallelTraining, AGraphThatIsKeptGivesItsGradientsAgain) {
  on_pairs([](Pair& pair) {
    const at::Tensor wanted = pair.plain_loss(), found = pair.parallel_loss();
    for (int pass = 0; pass < 2; ++pass) {
      wanted.backward({}, /*retain_graph=*/true);
      found.backward({}, /*retain_graph=*/true);
    }
    pair.expect_same(kClose);
  });
}

TEST_P(TensorParallelTraining, FrozenParametersHaveNoGradients) {
  on_pairs([](Pair& pair) {
    for (auto& model : {pair.plain, pair.parallel}) {
      model->embedding->weight.requires_grad_(false);
      model->blocks[0]->attention->query->weight.requires_grad_(false);
      model->blocks[1]->mlp_norm->weight.requires_grad_(false);
    }
    pair.plain_loss().backward();
    pair.parallel_loss().backward();
    pair.expect_same(kClose);
  });
}

TEST_P(TensorParallelTraining, PlainParametersBesideThoseOfThePlan) {
  const auto [world, cut_sequence] = GetParam();
  on_ranks_of(world, [&](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return Transformer(kConfig); };
    Pair pair{drawn(3, make), drawn(3, make)};
    parallelize_module(pair.parallel->blocks[0], mesh,
                       {{"mlp.up", ColwiseParallel{}}, {"attention.key", ColwiseParallel{}}});
    pair.plain_loss().backward();
    pair.parallel_loss().backward();
    pair.expect_same(kClose);
  });
}

TEST_P(TensorParallelTraining, WithoutGradientsTheLogitsAreThoseOfOneDevice) {
  on_pairs([](Pair& pair) {
    const torch::NoGradGuard no_grad;
    const at::Tensor found = full_tensor(pair.parallel->forward(pair.tokens));
    EXPECT_LE(distance(found, pair.plain->forward(pair.tokens)), kClose);
    const torch::InferenceMode inference;
    const at::Tensor inferred = full_tensor(pair.parallel->forward(pair.tokens));
    EXPECT_LE(distance(inferred, pair.plain->forward(pair.tokens)), kClose);
  });
}

TEST_P(TensorParallelTraining, TheLikeliestTokensAreThoseOfOneDevice) {
  on_pairs([](Pair& pair) {
    const at::Tensor prompt = torch::tensor({3, 1, 4});
    const at::Tensor wanted = pair.plain->generate(prompt, 4, /*temperature=*/0);
    EXPECT_TRUE(full_tensor(pair.parallel->generate(prompt, 4, /*temperature=*/0)).equal(wanted));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, TensorParallelTraining,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()),
                         [](const auto& info) {
                           return "World" + std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "SequenceCut" : "");
                         });

// Gradients of gradients pass through what styles move.
TEST(TensorParallelMlpTwice, SecondDerivativesAreThoseOfOneDevice) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const auto make = [] {
      return torch::nn::Sequential(torch::nn::Linear(6, 7), torch::nn::Tanh(),
                                   torch::nn::Linear(7, 6));
    };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"0", ColwiseParallel{}}, {"2", RowwiseParallel{}}});
    const at::Tensor input = drawn_tensor(2, {4, 6});
    for (auto* model : {&plain, &parallel}) {
      const at::Tensor x = input.clone().requires_grad_();
      const at::Tensor loss = (*model)->forward(x).square().sum();
      const auto grads = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
      full_tensor(grads[0]).square().sum().backward();
    }
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
