// fully_shard of tensor-parallel models on 2-D meshes, beside one device.
#include "tests/tensor_parallel/mesh_settings.h"
#include "tests/tensor_parallel/sharded_pair.h"

namespace fsdp::testing {
namespace {

constexpr ShardedPair::Config kSixHeads{
    .vocab = 64, .width = 24, .blocks = 2, .heads = 6, .kv_heads = 6, .max_tokens = 8};
constexpr ShardedPair::Config kFiveHeads{
    .vocab = 67, .width = 20, .blocks = 2, .heads = 5, .kv_heads = 5, .max_tokens = 8};
constexpr ShardedPair::Config kOneKeyHead{
    .vocab = 33, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 1, .max_tokens = 8};

// Over Gloo.
class ShardedMembers : public OnMeshes {
 protected:
  static void on_pairs_of(const ShardedPair::Config& config,
                          const std::function<void(ShardedPair&)>& body) {
    const auto& [dp, tp, cut_sequence, evict] = GetParam();
    on_pairs(config, dp, tp, cut_sequence, {}, body);
  }
  static void compare_steps(const ShardedPair::Config& config) {
    on_pairs_of(config, [](ShardedPair& pair) { pair.expect_same_steps(3); });
  }
};

TEST_P(ShardedMembers, StepsEqualOneDevice) { compare_steps(kSixHeads); }
TEST_P(ShardedMembers, StepsEqualOneDeviceWithFiveHeads) { compare_steps(kFiveHeads); }
TEST_P(ShardedMembers, StepsEqualOneDeviceWithARankWithoutKeys) { compare_steps(kOneKeyHead); }

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedMembers,
                         ::testing::Values(MeshSetting{1, 2, false}, MeshSetting{1, 3, true},
                                           MeshSetting{2, 1, false}, MeshSetting{2, 2, false},
                                           MeshSetting{2, 2, true}, MeshSetting{2, 2, true, true},
                                           MeshSetting{2, 2, false, true}, MeshSetting{1, 4, true}),
                         name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
