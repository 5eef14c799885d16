// The example's transformer, in shapes that no mesh divides, on all meshes beside one
// device, in float64, float32 and bfloat16. (meshes_test.cc has six, five and
// one heads.)
#include "tests/tensor_parallel/mesh_settings.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <algorithm>
#include <cmath>

namespace fsdp::testing {
namespace {

constexpr ShardedPair::Config kSevenHeads{
    .vocab = 67, .width = 28, .blocks = 1, .heads = 7, .kv_heads = 7, .max_tokens = 8};
constexpr ShardedPair::Config kTwoKeyHeads{
    .vocab = 67, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 2, .max_tokens = 8};
// On four ranks one has no head at all, and three have no key.
constexpr ShardedPair::Config kThreeHeads{
    .vocab = 33, .width = 12, .blocks = 1, .heads = 3, .kv_heads = 1, .max_tokens = 8};

class ShardedShapes : public OnMeshes {
 protected:
  static void compare_steps(const ShardedPair::Config& config) {
    on_ranks([&](const DeviceMesh& mesh) {
      ShardedPair(config, mesh, cuts_sequence()).expect_same_steps(2);
    });
  }
};

TEST_P(ShardedShapes, SevenHeads) { compare_steps(kSevenHeads); }
TEST_P(ShardedShapes, TwoKeyHeads) { compare_steps(kTwoKeyHeads); }
TEST_P(ShardedShapes, ThreeHeads) { compare_steps(kThreeHeads); }

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedShapes, ::testing::ValuesIn(every_mesh()), name_of_mesh);

constexpr ShardedPair::Config kTwoBlocks{
    .vocab = 67, .width = 20, .blocks = 2, .heads = 5, .kv_heads = 5, .max_tokens = 8};

class ShardedInFloat : public OnMeshes {};

TEST_P(ShardedInFloat, OnlyRoundingDiffers) {
  on_ranks([](const DeviceMesh& mesh) {
    ShardedPair pair(kTwoBlocks, mesh, cuts_sequence(), {}, torch::kFloat32);
    pair.expect_same_losses(2e-5);
    pair.backward();
    pair.expect_same_gradients(2e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedInFloat, ::testing::ValuesIn(every_mesh()), name_of_mesh);

class ShardedInSixteenBits : public OnMeshes {};

// Training in bfloat16, of weights in float, follows that in float.
TEST_P(ShardedInSixteenBits, TheLossFollowsThatOfOneDevice) {
  on_ranks([](const DeviceMesh& mesh) {
    const FullyShardOptions options{
        .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32}};
    ShardedPair pair(kTwoBlocks, mesh, cuts_sequence(), options, torch::kFloat32);
    const auto adamw = torch::optim::AdamWOptions(3e-3).eps(1e-3);
    torch::optim::AdamW theirs(pair.plain->parameters(), adamw);
    torch::optim::AdamW ours(pair.sharded->parameters(), adamw);
    const auto loss = [](programs::Transformer& model, const at::Tensor& text) {
      return programs::next_token_loss(model->forward(text.narrow(1, 0, 5)), text.narrow(1, 1, 5));
    };
    const at::Tensor own = pair.text[pair.data_rank()];
    double first = 0, last = 0, largest = 0;
    for (int step = 0; step < 20; ++step) {
      theirs.zero_grad();
      ours.zero_grad();
      loss(pair.plain, pair.text.flatten(0, 1)).backward();
      const at::Tensor wanted = loss(pair.plain, own), found = loss(pair.sharded, own);
      found.backward();
      theirs.step();
      ours.step();
      last = wanted.item<double>();
      if (step == 0) first = last;
      const double difference = std::abs(full_tensor(found.detach()).item<double>() - last);
      EXPECT_LE(difference, 1e-2) << "step " << step;
      largest = std::max(largest, difference);
    }
    EXPECT_LT(last, first - 1);
    EXPECT_GT(largest, 1e-4);  // it is not float that is compared
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedInSixteenBits,
                         ::testing::Values(MeshSetting{.dp = 1, .tp = 2},
                                           MeshSetting{.dp = 1, .tp = 3, .cut_sequence = true},
                                           MeshSetting{.dp = 2, .tp = 2, .evict = true},
                                           MeshSetting{.dp = 1, .tp = 4, .cut_sequence = true}),
                         name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
