// Gradients of several backwards that add up: what ranks hold as terms of a sum is summed
// at the end of each, for all parameters at once, in the second as in the first.
#include "programs/trainer/model/transformer.h"
#include "tensor_parallel/communication_log.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/counted_collectives.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <gmock/gmock.h>

#include <stdexcept>
#include <vector>

namespace fsdp::testing {
namespace {

using programs::Transformer;

class AccumulatedGradients : public Worlds {
 protected:
  static programs::TransformerConfig config() {
    return {.vocab = 64, .width = 48, .blocks = 2, .heads = 6, .kv_heads = 1, .max_tokens = 8};
  }
  // Keys and values of one head, whole on every rank, and the sequence cut.
  static ParallelPlan plan() {
    ParallelPlan plan = transformer_plan(/*head_width=*/8, /*cut_sequence=*/true);
    for (const char* name : {"block*.attention.key", "block*.attention.value"})
      plan.emplace_back(name, ReplicateParallel{.input_layout = Replicate{}});
    return plan;
  }
};

TEST_P(AccumulatedGradients, CostNoMoreFromTheSecondBackwardOn) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return Transformer(config()); };
    auto plain = drawn(3, make), parallel = drawn(3, make);
    parallelize_module(parallel, mesh, plan());
    const RedistributionPolicy policy(Redistribution::kExplicit);
    CountedCollectives counted(mesh);
    std::vector<CollectiveCounts> backwards;
    for (int batch = 0; batch < 3; ++batch) {
      const at::Tensor tokens = (torch::arange(16).view({2, 8}) + batch) % 64;
      transformer_loss(plain->forward(tokens), tokens).backward();
      const at::Tensor loss = transformer_loss(parallel->forward(tokens), tokens);
      counted.take();
      loss.backward();
      backwards.push_back(counted.take());
    }
    EXPECT_EQ(backwards[1], backwards[0]);
    EXPECT_EQ(backwards[2], backwards[0]);
    expect_same_gradients(*parallel, *plain, kClose);
  });
}

// Where it fails midway, terms that were to be added are not.
TEST_P(AccumulatedGradients, AreWholeAfterABackwardThatFailed) {
  if (world() == 1) return;  // there are no terms
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] {
      return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                                   torch::nn::Linear(6, 6));
    };
    auto parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"0", SequenceParallel{}}, {"1", ColwiseParallel{}}});
    const auto& weight = parallel[0]->as<torch::nn::LayerNorm>()->weight;
    at::Tensor x = drawn_tensor(2, {2, 6, 6});
    parallel->forward(x).square().sum().backward();
    const at::Tensor before = full_gradient(weight).clone();
    at::Tensor failing = x.clone().requires_grad_();
    failing.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("here"); });
    EXPECT_THAT(message_of([&] { parallel->forward(failing.mul(2)).square().sum().backward(); }),
                ::testing::HasSubstr("here"));
    EXPECT_EQ(DTensor(weight.grad()).placements(), std::vector<Placement>{Replicate{}});
    EXPECT_TRUE(full_gradient(weight).equal(before));
    parallel->forward(x).square().sum().backward();
    EXPECT_LE(distance(full_gradient(weight), before.mul(2)), kClose);
  });
}

INSTANTIATE_WORLDS(AccumulatedGradients, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
