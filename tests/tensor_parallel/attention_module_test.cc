// torch::nn::MultiheadAttention and TransformerEncoderLayer, unchanged, on one device and
// over the ranks: heads are cut within packed projections, behind the batch.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <tuple>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kWidth = 20, kHeads = 5;

torch::nn::MultiheadAttention make_attention() {
  return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(kWidth, kHeads));
}

// Gradients of the parameters and of the inputs.
template <class Run>
void expect_as_plain(torch::nn::Module& plain, torch::nn::Module& parallel,
                     const std::vector<at::Tensor>& inputs, const Run& run) {
  std::vector<at::Tensor> theirs, ours;
  for (const auto& input : inputs) {
    theirs.push_back(input.clone().requires_grad_());
    ours.push_back(input.clone().requires_grad_());
  }
  const at::Tensor wanted = run(plain, theirs), found = run(parallel, ours);
  EXPECT_LE(distance(full_tensor(found.detach()), wanted.detach()), kClose);
  wanted.pow(3).sum().backward();  // the sum of squares of a layer norm is constant
  found.pow(3).sum().backward();
  expect_same_gradients(parallel, plain, kClose);
  for (size_t i = 0; i < inputs.size(); ++i)
    EXPECT_LE(distance(ours[i].grad(), theirs[i].grad()), kClose) << i;
}

class TensorParallelAttention : public Worlds {};

TEST_P(TensorParallelAttention, OfATextToItself) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(1, make_attention), parallel = drawn(1, make_attention);
    parallelize_module(parallel, mesh, {{"", ColwiseParallel{.sections = 3}}});
    expect_as_plain(*plain, *parallel, {drawn_tensor(2, {6, 3, kWidth})},
                    [](torch::nn::Module& module, const std::vector<at::Tensor>& inputs) {
                      auto& attention = *module.as<torch::nn::MultiheadAttentionImpl>();
                      return std::get<0>(attention.forward(inputs[0], inputs[0], inputs[0]));
                    });
  });
}

TEST_P(TensorParallelAttention, OfATextToAnother) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(1, make_attention), parallel = drawn(1, make_attention);
    parallelize_module(parallel, mesh, {{"", ColwiseParallel{.sections = 3}}});
    expect_as_plain(*plain, *parallel,
                    {drawn_tensor(2, {6, 3, kWidth}), drawn_tensor(3, {4, 3, kWidth})},
                    [](torch::nn::Module& module, const std::vector<at::Tensor>& inputs) {
                      auto& attention = *module.as<torch::nn::MultiheadAttentionImpl>();
                      return std::get<0>(attention.forward(inputs[0], inputs[1], inputs[1]));
                    });
  });
}

const ParallelPlan kEncoderPlan = {{"self_attn", ColwiseParallel{.sections = 3}},
                                   {"linear1", ColwiseParallel{}},
                                   {"linear2", RowwiseParallel{}}};

torch::nn::TransformerEncoderLayer make_encoder() {
  return torch::nn::TransformerEncoderLayer(
      torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads).dim_feedforward(26).dropout(0));
}

at::Tensor encode(torch::nn::Module& module, const std::vector<at::Tensor>& inputs) {
  return module.as<torch::nn::TransformerEncoderLayerImpl>()->forward(inputs[0]);
}

TEST_P(TensorParallelAttention, InAnEncoderLayer) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = drawn(1, make_encoder), parallel = drawn(1, make_encoder);
    parallelize_module(parallel, mesh, kEncoderPlan);
    expect_as_plain(*plain, *parallel, {drawn_tensor(2, {6, 3, kWidth})}, encode);
  });
}

INSTANTIATE_WORLDS(TensorParallelAttention, 1, 2, 3);

TEST(TensorParallelAttentionPlan, CutsHeadsAndTheOutputProjection) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto encoder = drawn(1, make_encoder);
    parallelize_module(encoder, mesh, kEncoderPlan);
    const auto placement = [&](const char* name) {
      return DTensor(encoder->named_parameters()[name]).placements()[0];
    };
    EXPECT_EQ(placement("self_attn.in_proj_weight"), Placement(Shard{0, 3, 4}));
    EXPECT_EQ(placement("self_attn.in_proj_bias"), Placement(Shard{0, 3, 4}));
    EXPECT_EQ(placement("self_attn.out_proj.weight"), Placement(Shard{1, 1, 4}));
    EXPECT_EQ(placement("self_attn.out_proj.bias"), Placement(Replicate{}));
    auto other = drawn(1, make_encoder);
    expect_error<c10::ValueError>(
        [&] {
          parallelize_module(other, mesh, {{"self_attn", ColwiseParallel{}}});
        },
        AllOf(HasSubstr("self_attn.in_proj_weight"), HasSubstr("packs query, key and value"),
              HasSubstr(".sections = 3")));
  });
}

TEST(TensorParallelAttentionPlan, AShardedEncoderLayerIsThatOfOneDevice) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    auto plain = drawn(1, make_encoder), sharded = drawn(1, make_encoder);
    parallelize_module(sharded, mesh["tp"], kEncoderPlan);
    fully_shard(sharded, mesh["dp"]);
    expect_as_plain(*plain, *sharded, {drawn_tensor(2, {6, 3, kWidth})}, encode);
  });
}

}  // namespace
}  // namespace fsdp::testing
