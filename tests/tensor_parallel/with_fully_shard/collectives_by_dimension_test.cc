// What fully_shard of tensor-parallel members moves, by dimension of the mesh. The first
// step compares the ranks' inputs, too (../first_inputs_test.cc).
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/counters.h"
#include "tests/tensor_parallel/sharded_pair.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::RecordedOperation;

// What was announced on one dimension since the last call.
class Announced {
 public:
  explicit Announced(const DeviceMesh& mesh) : log_(internal::collectives_of(mesh, 0).log()) {
    take();
  }

  std::vector<RecordedOperation> take() {
    std::vector<RecordedOperation> fresh;
    for (const auto& operation : log_->recent_operations()) {
      if (operation.lane == 0 && operation.sequence > last_) fresh.push_back(operation);
    }
    if (!fresh.empty()) last_ = fresh.back().sequence;
    return fresh;
  }

 private:
  std::shared_ptr<internal::IssueLog> log_;
  int64_t last_ = -1;
};

int64_t bytes_of(const std::vector<RecordedOperation>& operations) {
  int64_t bytes = 0;
  for (const auto& each : operations) bytes += each.bytes;
  return bytes;
}

void pass_first_step(ShardedPair& pair) {
  pair.sharded_loss().backward();
  pair.sharded->zero_grad();
}

ShardedPair::Config model_of(int64_t blocks) {
  return {.vocab = 64, .width = 16, .blocks = blocks, .heads = 4, .kv_heads = 4, .max_tokens = 8};
}

TEST(ShardedEffects, NormsOfAUnitAreSummedOverTheirMeshTogether) {
  for (const int64_t blocks : {1, 3}) {
    on_pairs(model_of(blocks), 2, 2, /*cut_sequence=*/true, {}, [&](ShardedPair& pair) {
      pass_first_step(pair);
      Announced announced(pair.mesh["tp"]);
      const at::Tensor loss = pair.sharded_loss();
      EXPECT_EQ(announced.take().size(), 2 * (2 * blocks + 1) + 1);
      loss.backward();
      const auto backward = announced.take();
      const auto sums = std::count_if(backward.begin(), backward.end(), [](const auto& each) {
        return each.what.find("tensor-parallel gradients") != std::string::npos;
      });
      EXPECT_EQ(sums, blocks + 1);
      EXPECT_EQ(backward.size(), 2 * (2 * blocks + 1) + 1 + sums);
    });
  }
}

TEST(ShardedEffects, WithoutReplicatedMembersNothingIsSummed) {
  on_pairs(model_of(3), 2, 2, /*cut_sequence=*/false, {}, [&](ShardedPair& pair) {
    pass_first_step(pair);
    Announced announced(pair.mesh["tp"]);
    const at::Tensor loss = pair.sharded_loss();
    EXPECT_EQ(announced.take().size(), 2 * 3 + 2);
    loss.backward();
    EXPECT_EQ(announced.take().size(), 2 * 3 + 2);
  });
}

TEST(ShardedEffects, ActivationsMoveInTheParametersDtype) {
  const auto forward_bytes = [](const FullyShardOptions& options) {
    std::atomic<int64_t> bytes = 0;
    on_pairs(model_of(2), 2, 2, /*cut_sequence=*/true, options, [&](ShardedPair& pair) {
      Announced announced(pair.mesh["tp"]);
      pair.sharded_loss();
      bytes = bytes_of(announced.take());
    });
    return bytes.load();
  };
  const int64_t wide = forward_bytes({});
  const int64_t narrow = forward_bytes({.mp_policy = {.param_dtype = torch::kFloat16}});
  EXPECT_GE(wide, 3 * narrow);
}

TEST(ShardedEffects, DataRanksGatherOnlyTheirPartOfAMember) {
  const auto gathered_bytes = [](int64_t tp) {
    std::atomic<int64_t> bytes = 0;
    on_pairs(model_of(2), 2, tp, /*cut_sequence=*/false, {}, [&](ShardedPair& pair) {
      const int64_t before = counters(pair.mesh["dp"]).all_gather_bytes;
      pair.sharded_loss().backward();
      bytes = counters(pair.mesh["dp"]).all_gather_bytes - before;
    });
    return static_cast<double>(bytes.load());
  };
  EXPECT_NEAR(gathered_bytes(2) / gathered_bytes(1), 0.5, 0.06);  // but for norms and padding
}

TEST(ShardedEffects, HalvesOfTheRanksThatShardKeepTheirPartsOfAMember) {
  const FullyShardOptions halves{.reshard_after_forward = ReshardAfterForward::to_world(2)};
  on_pairs(model_of(2), 4, 2, /*cut_sequence=*/false, halves, [](ShardedPair& pair) {
    const at::Tensor loss = pair.sharded_loss();
    EXPECT_GT(counters(pair.data_mesh()).post_forward_bytes, 0);
    loss.backward();
    EXPECT_EQ(counters(pair.data_mesh()).post_forward_bytes, 0);
    pair.plain_loss().backward();
    pair.expect_same_gradients();
  });
}

// Groups have threads and sockets.
TEST(ShardedEffects, AModelThatGoesLetsTheGroupsOfItsMeshGo) {
  for (const bool trains : {false, true}) {
    run_ranks(4, [&](int64_t) {
      std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups;
      {
        const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
        for (const char* dim : {"dp", "tp"}) groups.emplace_back(mesh[dim].group());
        ShardedPair pair(model_of(1), mesh, /*cut_sequence=*/true);
        if (trains) pair.sharded_loss().backward();
      }
      for (const auto& group : groups) EXPECT_TRUE(group.expired()) << trains;
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
