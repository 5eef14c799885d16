// What the log says of a step, and what the explicit policy refuses.
#include "tensor_parallel/communication_log.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <algorithm>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Cause = CommunicationCause;

constexpr ShardedPair::Config kLogged{
    .vocab = 64, .width = 16, .blocks = 2, .heads = 4, .kv_heads = 4, .max_tokens = 8};

int64_t count(const CommunicationLog& log, const std::string& collective, Cause cause,
              bool in_backward) {
  return std::count_if(log.entries().begin(), log.entries().end(), [&](const auto& each) {
    return each.collective == collective && each.cause == cause && each.in_backward == in_backward;
  });
}

int64_t announced(const DeviceMesh& mesh) {
  const auto recent = internal::collectives_of(mesh, 0).log()->recent_operations();
  return recent.empty() ? 0 : recent.back().sequence;
}

TEST(CommunicationLog, HasEachCollectiveOfAStepWithItsCause) {
  constexpr int64_t kBlocks = 2;
  on_pairs(kLogged, 2, 2, /*cut_sequence=*/true, {}, [&](ShardedPair& pair) {
    pair.sharded_loss().backward();  // the first step compares the ranks' inputs, too
    pair.sharded->zero_grad();
    CommunicationLog log;
    const int64_t before = announced(pair.mesh["tp"]);
    pair.sharded_loss().backward();
    EXPECT_EQ(log.entries().size(), announced(pair.mesh["tp"]) - before);
    // Attention, mlp and head gather their inputs; attention, mlp and embedding scatter
    // sums.
    EXPECT_EQ(count(log, "all-gather", Cause::kStyle, false), 2 * kBlocks + 1);
    EXPECT_EQ(count(log, "reduce-scatter", Cause::kStyle, false), 2 * kBlocks + 1);
    EXPECT_EQ(count(log, "all-gather", Cause::kExchange, false), 1);
    EXPECT_EQ(count(log, "all-gather", Cause::kGradient, true), 2 * kBlocks + 1);
    EXPECT_EQ(count(log, "reduce-scatter", Cause::kGradient, true), 2 * kBlocks + 1);
    EXPECT_EQ(count(log, "all-reduce", Cause::kExchange, true), 1);
    EXPECT_EQ(count(log, "all-reduce", Cause::kGradient, true), kBlocks + 1);  // norms
    for (const auto& each : log.entries()) {
      EXPECT_EQ(each.mesh_dim, "tp");
      EXPECT_GT(each.bytes, 0);
    }
  });
}

TEST(CommunicationLog, TellsOperatorPlacementsBytesAndTotals) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const at::Tensor a = distribute_tensor(torch::ones({4, 6}), mesh, {Shard{1}});
    CommunicationLog log;
    {
      CommunicationLog inner;
      a.view({3, 8});
      EXPECT_EQ(inner.entries().size(), 1);
    }
    DTensor(a).full_tensor();
    a.sum().item();
    ASSERT_EQ(log.entries().size(), 3);
    EXPECT_EQ(to_string(log.entries()[0]),
              "all-gather over 0, Shard(1) -> Replicate() of [4, 6], 48 bytes: aten::view, rule, "
              "forward");
    EXPECT_EQ(to_string(log.entries()[1]),
              "all-gather over 0, Shard(1) -> Replicate() of [4, 6], 48 bytes: no operator, "
              "request, forward");
    EXPECT_EQ(log.entries()[2].cause, Cause::kRequest);
    EXPECT_EQ(log.bytes(), 48 + 48 + 4);
    EXPECT_THAT(log.text(), AllOf(HasSubstr("rule: 1 collectives, 48 bytes"),
                                  HasSubstr("request: 2 collectives, 52 bytes")));
    log.clear();
    EXPECT_TRUE(log.entries().empty());
  });
}

TEST(RedistributionPolicy, ExplicitLetsAPlannedStepThrough) {
  for (const bool cut_sequence : {false, true}) {
    on_pairs(kLogged, 2, 2, cut_sequence, {}, [](ShardedPair& pair) {
      const RedistributionPolicy policy(Redistribution::kExplicit);
      pair.backward();
      pair.expect_same_gradients();
    });
  }
}

TEST(RedistributionPolicy, ExplicitRefusesWhatNobodyAskedFor) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const at::Tensor a = distribute_tensor(torch::ones({4, 6}), mesh, {Shard{1}});
    {
      const RedistributionPolicy policy(Redistribution::kExplicit);
      const RedistributionPolicy allowed_within(Redistribution::kAllow);
      expect_error<c10::ValueError>(
          [&] {
            a.view({3, 8});
          },
          AllOf(HasSubstr("explicit"), HasSubstr("aten::view"), HasSubstr("Shard(1)")));
      EXPECT_EQ(DTensor(a).full_tensor().sizes(), a.sizes());
      EXPECT_EQ(a.sum().item<double>(), 24);
    }
    const RedistributionPolicy allow(Redistribution::kAllow);
    EXPECT_EQ(a.view({3, 8}).sizes(), at::IntArrayRef({3, 8}));
  });
}

}  // namespace
}  // namespace fsdp::testing
