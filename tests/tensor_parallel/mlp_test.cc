// A torch::nn::Sequential as it comes, on one device and over the ranks.
#include "dtensor/dtensor.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

namespace fsdp::testing {
namespace {

torch::nn::Sequential make_mlp(int64_t hidden) {
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                               torch::nn::Linear(6, hidden), torch::nn::GELU(),
                               torch::nn::Linear(hidden, 6));
}

class MlpCase {
 public:
  MlpCase(int64_t hidden, std::vector<int64_t> input_shape, const DeviceMesh& mesh,
          const ParallelPlan& plan)
      : plain(drawn(1, [&] { return make_mlp(hidden); })),
        parallel(drawn(1, [&] { return make_mlp(hidden); })),
        input(drawn_tensor(2, input_shape)) {
    parallelize_module(parallel, mesh, plan);
  }

  void compare() {
    const at::Tensor theirs = input.clone().requires_grad_();
    const at::Tensor ours = input.clone().requires_grad_();
    const at::Tensor wanted = plain->forward(theirs), found = parallel->forward(ours);
    EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
    wanted.square().sum().backward();
    found.square().sum().backward();
    expect_same_gradients(*parallel, *plain, kClose);
    EXPECT_FALSE(is_dtensor(ours.grad()));
    EXPECT_LE(distance(ours.grad(), theirs.grad()), kClose);
  }

  torch::nn::Sequential plain, parallel;
  at::Tensor input;
};

const ParallelPlan kMegatron = {{"1", ColwiseParallel{}}, {"3", RowwiseParallel{}}};
const ParallelPlan kSequence = {{"0", SequenceParallel{}},
                                {"1", ColwiseParallel{}},
                                {"3", RowwiseParallel{.output_layout = Shard{1}}}};

class TensorParallelMlp : public Worlds {};

TEST_P(TensorParallelMlp, EqualsOneDevice) {
  for (const int64_t hidden : {16, 7}) {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      MlpCase(hidden, {3, 5, 6}, mesh, kMegatron).compare();
      MlpCase(hidden, {4, 6}, mesh, kMegatron).compare();
    });
  }
}

TEST_P(TensorParallelMlp, EqualsOneDeviceWithTheSequenceCut) {
  for (const int64_t hidden : {16, 7}) {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      MlpCase(hidden, {3, 5, 6}, mesh, kSequence).compare();
    });
  }
}

TEST_P(TensorParallelMlp, EqualsOneDeviceWithoutStyles) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const auto& [first, second] : {std::pair{Shard{0}, Shard{1}}, {Shard{1}, Shard{0}}}) {
      MlpCase(7, {3, 5, 6}, mesh,
              {{"1.weight", ShardParameter{first}}, {"3.weight", ShardParameter{second}}})
          .compare();
    }
  });
}

INSTANTIATE_WORLDS(TensorParallelMlp, 1, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
