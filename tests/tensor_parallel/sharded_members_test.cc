// fully_shard of tensor-parallel models on 2-D meshes, beside one device.
#include "on_demand/on_demand_storage.h"
#include "tests/tensor_parallel/sharded_pair.h"

namespace fsdp::testing {
namespace {

struct Setting {
  int64_t dp, tp;
  bool cut_sequence;
  bool evict = false;
};

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  const auto& [dp, tp, cut_sequence, evict] = info.param;
  return "Dp" + std::to_string(dp) + "Tp" + std::to_string(tp) +
         (cut_sequence ? "SequenceCut" : "") + (evict ? "Evicted" : "");
}

constexpr ShardedPair::Config kSixHeads{
    .vocab = 64, .width = 24, .blocks = 2, .heads = 6, .kv_heads = 6, .max_tokens = 8};
constexpr ShardedPair::Config kFiveHeads{
    .vocab = 67, .width = 20, .blocks = 2, .heads = 5, .kv_heads = 5, .max_tokens = 8};
constexpr ShardedPair::Config kOneKeyHead{
    .vocab = 33, .width = 16, .blocks = 1, .heads = 4, .kv_heads = 1, .max_tokens = 8};

class ShardedMembers : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { internal::set_evict_after_every_operator(GetParam().evict); }
  void TearDown() override { internal::set_evict_after_every_operator(false); }

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
                         ::testing::Values(Setting{1, 2, false}, Setting{1, 3, true},
                                           Setting{2, 1, false}, Setting{2, 2, false},
                                           Setting{2, 2, true}, Setting{2, 2, true, true},
                                           Setting{2, 2, false, true}, Setting{1, 4, true}),
                         name_of);

}  // namespace
}  // namespace fsdp::testing
