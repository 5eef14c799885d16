// Derivatives of gradients, of cut weights and of inputs: those of one device.
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/grad.h"
#include "tensor_parallel/communication_log.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/mesh_settings.h"

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

torch::nn::Sequential make_smooth_mlp() {
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                               torch::nn::Linear(6, 7), torch::nn::Tanh(), torch::nn::Linear(7, 6));
}

struct NamedPlan {
  const char* name;
  ParallelPlan plan;
};

std::vector<NamedPlan> smooth_plans() {
  return {{"styles", {{"1", ColwiseParallel{}}, {"3", RowwiseParallel{}}}},
          {"the sequence cut",
           {{"0", SequenceParallel{}},
            {"1", ColwiseParallel{}},
            {"3", RowwiseParallel{.output_layout = Shard{1}}}}},
          {"no styles",
           {{"0.weight", ReplicateParallel{}},
            {"1.weight", ShardParameter{Shard{1}}},
            {"3.weight", ShardParameter{Shard{0}}},
            {"3.bias", ShardParameter{Shard{0}}}}}};
}

at::Tensor sum_of_cubes(const Tensors& gradients) {
  at::Tensor sum;
  for (const at::Tensor& each : gradients) {
    const at::Tensor cubes = full_tensor(each).pow(3).sum();
    sum = sum.defined() ? sum + cubes : cubes;
  }
  return sum;
}

class SecondDerivatives : public Worlds {
 protected:
  // `penalty` of the model and its input, then one backward.
  template <class Penalty>
  void compare(const Penalty& penalty) {
    for (const auto& [name, plan] : smooth_plans()) {
      on_ranks([&, name = name, plan = plan](int64_t, const DeviceMesh& mesh) {
        SCOPED_TRACE(name);
        auto plain = drawn(1, make_smooth_mlp), parallel = drawn(1, make_smooth_mlp);
        parallelize_module(parallel, mesh, plan);
        const at::Tensor input = drawn_tensor(2, {3, 5, 6});
        const at::Tensor theirs = input.clone().requires_grad_();
        const at::Tensor ours = input.clone().requires_grad_();
        const at::Tensor wanted = penalty(plain, theirs), found = penalty(parallel, ours);
        EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
        wanted.backward();
        const CommunicationLog log;
        found.backward();
        for (const auto& each : log.entries())
          EXPECT_TRUE(each.cause != CommunicationCause::kStyle &&
                      each.cause != CommunicationCause::kBoundary)
              << to_string(each);
        expect_same_gradients(*parallel, *plain, kClose);
        EXPECT_LE(distance(ours.grad(), theirs.grad()), kClose);
        EXPECT_GT(theirs.grad().abs().max().item<double>(), 1e-3);
      });
    }
  }
};

TEST_P(SecondDerivatives, OfAPenaltyOnTheGradientsOfWeights) {
  compare([](torch::nn::Sequential& model, const at::Tensor& x) {
    const at::Tensor loss = model->forward(x).square().sum();
    return sum_of_cubes(torch::autograd::grad({loss}, model->parameters(), {}, true,
                                              /*create_graph=*/true));
  });
}

TEST_P(SecondDerivatives, OfAPenaltyOnTheGradientOfTheInput) {
  compare([](torch::nn::Sequential& model, const at::Tensor& x) {
    const at::Tensor loss = model->forward(x).pow(3).sum();
    return loss + sum_of_cubes(torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true));
  });
}

// What is multiplied lies as the gradient; nothing is made whole by hand.
TEST_P(SecondDerivatives, OfTheProductOfAHessianAndAVector) {
  compare([](torch::nn::Sequential& model, const at::Tensor& x) {
    const at::Tensor loss = model->forward(x).square().sum();
    const auto gradients = torch::autograd::grad({loss}, model->parameters(), {}, true,
                                                 /*create_graph=*/true);
    at::Tensor product = loss * 0;
    for (const at::Tensor& each : gradients) {
      const at::Tensor vector =
          torch::arange(each.numel(), torch::kFloat64).cos().view(each.sizes());
      product = product + (each * vector).sum();
    }
    return product;
  });
}

INSTANTIATE_WORLDS(SecondDerivatives, 1, 2, 3, 4);

class ShardedSecondDerivatives : public OnMeshes {};

// fsdp::grad gives this data rank's gradients, unreduced; what depends on them is
// reduced.
TEST_P(ShardedSecondDerivatives, OfAPenaltyOnTheGradientsOfWeights) {
  const auto plan = smooth_plans()[cuts_sequence() ? 1 : 0].plan;
  on_ranks([&](const DeviceMesh& mesh) {
    auto plain = drawn(1, make_smooth_mlp), sharded = drawn(1, make_smooth_mlp);
    parallelize_module(sharded, mesh["tp"], plan);
    fully_shard(sharded, mesh["dp"]);
    const int64_t data_ranks = mesh["dp"].size();
    const at::Tensor inputs = drawn_tensor(2, {data_ranks, 3, 5, 6});
    const auto penalised = [](torch::nn::Sequential& model, const at::Tensor& x) {
      const at::Tensor loss = model->forward(x).square().sum();
      return loss + sum_of_cubes(grad({loss}, model->parameters(), {}, true,
                                      /*create_graph=*/true));
    };
    for (int64_t rank = 0; rank < data_ranks; ++rank)
      (penalised(plain, inputs[rank]) / data_ranks).backward();
    penalised(sharded, inputs[mesh["dp"].local_rank()]).backward();
    expect_same_gradients(*sharded, *plain, kClose);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedSecondDerivatives, ::testing::ValuesIn(every_mesh()),
                         name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
