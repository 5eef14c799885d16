// A tensor-parallel model that is sharded, on one rank: what works on many must be tried
// on one.
#include "tests/tensor_parallel/sharded_pair.h"

namespace fsdp::testing {
namespace {

constexpr ShardedPair::Config kSmall{
    .vocab = 17, .width = 8, .blocks = 1, .heads = 2, .kv_heads = 1, .max_tokens = 8};

TEST(TensorParallelOnOneRank, ATransformerIsThatOfOneDevice) {
  for (const bool cut_sequence : {false, true}) {
    on_pairs(kSmall, 1, 1, cut_sequence, {}, [](ShardedPair& pair) {
      pair.backward();
      pair.expect_same_gradients();
    });
  }
}

// The second product gives terms, of which there is one, and so is the gradient of what
// reads them.
TEST(TensorParallelOnOneRank, TermsAreTheGradientOfACopy) {
  run_ranks(1, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 1}, {"dp", "tp"});
    const auto linear = [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    const auto make = [&] {
      return torch::nn::Sequential(linear(4, 6), linear(6, 4), linear(4, 3));
    };
    auto plain = drawn(1, make), sharded = drawn(1, make);
    parallelize_module(sharded, mesh["tp"],
                       {{"0.weight", ShardParameter{Shard{0}}},
                        {"1.weight", ShardParameter{Shard{1}}},
                        {"2", ReplicateParallel{}}});
    fully_shard(sharded, mesh["dp"]);
    const at::Tensor input = drawn_tensor(2, {5, 4});
    plain->forward(input).pow(3).sum().backward();
    sharded->forward(input).pow(3).sum().backward();
    expect_same_gradients(*sharded, *plain, kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
