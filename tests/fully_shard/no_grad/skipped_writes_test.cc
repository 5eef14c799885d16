// A rank that wrote its shards less often than the others, or alone, is found out at the
// unit's next gather, by all of them. Nothing that is legal is taken for it.
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/slowdown.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Six rows of every parameter: each rank of two and of three holds some.
Pair six_row_pair(const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  return sharded(Pair(4, 6, 6), mesh, options);
}

void train_once(Pair& model, torch::optim::Optimizer& optimizer, bool skips = false) {
  optimizer.zero_grad();
  model(torch::ones({2, 4})).pow(2).mean().backward();
  if (!skips) optimizer.step();
}

std::string others_than(int64_t alone, int64_t world) {
  std::string ranks = world > 2 ? "ranks " : "rank ";
  for (int64_t rank = 0, first = 1; rank < world; ++rank) {
    if (rank == alone) continue;
    ranks += (first != 0 ? "" : ", ") + std::to_string(rank);
    first = 0;
  }
  return ranks;
}

// Over Gloo, where words of the ranks travel with gathers. Where ranks share memory the
// same programs fail otherwise (transport/one_sided_reads_test.cc).
class SkippedWrites : public Worlds {
 private:
  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // where a touch is collective
};

TEST_P(SkippedWrites, AnOptimizerStepThatOneRankSkipsIsAnErrorOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    train_once(model, optimizer);
    train_once(model, optimizer, /*skips=*/rank == 1);
    const auto begin = std::chrono::steady_clock::now();
    const auto counts = "2 times on " + others_than(1, world()) + "; 1 time on rank 1";
    EXPECT_THAT(message_of<c10::ValueError>([&] { train_once(model, optimizer); }),
                AllOf(HasSubstr("unit 'first'"), HasSubstr(counts), HasSubstr("optimizer.step()"),
                      HasSubstr("(rank " + std::to_string(rank) + ")")));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(5));
  });
}

TEST_P(SkippedWrites, AWriteOfOneRankAloneIsAnErrorOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    const auto x = torch::ones({2, 4});
    const torch::NoGradGuard no_grad;
    model(x);
    if (rank == 0) model->second->parameters()[1].mul_(2);
    EXPECT_THAT(message_of<c10::ValueError>([&] { model(x); }),
                AllOf(HasSubstr("unit 'second'"),
                      HasSubstr("1 time on rank 0; 0 times on " + others_than(0, world()))));
    // Every rank writes the shards anew: nothing of it is left.
    for (auto& parameter : model->parameters()) parameter.copy_(torch::ones(parameter.sizes()));
    EXPECT_TRUE(model(x).allclose(torch::full({2, 6}, 1 + 6 * std::tanh(5.0))));
  });
}

// Rank 0's gathers meet those of the others' next forward, of a later state. The backward
// after that meets a gather.
TEST_P(SkippedWrites, ATouchOfOneRankBetweenTwoStepsOfAllIsAnErrorOnEveryRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    train_once(model, optimizer);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(message_of<c10::Error>([&] {
                  if (rank == 0) model->first(torch::ones({2, 4}));
                  optimizer.step();
                  train_once(model, optimizer);
                }),
                AllOf(HasSubstr("all-gather of unit 'first'"), HasSubstr("reduce-scatter of unit"),
                      HasSubstr("rank " + std::to_string(rank))));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(5));
  });
}

INSTANTIATE_WORLDS(SkippedWrites, 2, 3);

// Hybrid sharding over {replicas, shards}; replicate() over as many ranks where there is
// one shard.
struct ReplicaShape {
  int64_t replicas, shards;
};

class SkippedWritesOfReplicas : public ::testing::TestWithParam<ReplicaShape> {
 protected:
  using Body = std::function<void(int64_t replica, Pair& model)>;

  void on_replicas(const Body& body) const {
    const auto shape = GetParam();
    run_ranks(shape.replicas * shape.shards, [&](int64_t rank) {
      if (shape.shards == 1) {
        Pair model(4, 6, 6);
        replicate(model, init_device_mesh(torch::kCPU, {shape.replicas}));
        return body(rank, model);
      }
      auto model = six_row_pair(init_device_mesh(torch::kCPU, {shape.replicas, shape.shards}));
      body(rank / shape.shards, model);
    });
  }
};

TEST_P(SkippedWritesOfReplicas, AnOptimizerStepThatOneReplicaSkipsIsAnErrorOnEveryRank) {
  on_replicas([](int64_t replica, Pair& model) {
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    train_once(model, optimizer);
    train_once(model, optimizer, /*skips=*/replica == 1);
    const auto begin = std::chrono::steady_clock::now();
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(message_of([&] { train_once(model, optimizer); }),
                  AllOf(HasSubstr("not all replicas wrote the shards of unit '"),
                        HasSubstr("written on rank"), HasSubstr("optimizer.step()")));
      for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(5));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.copy_(torch::ones(parameter.sizes()));
    }
    for (int step = 0; step < 2; ++step) train_once(model, optimizer);
  });
}

TEST_P(SkippedWritesOfReplicas, AWriteOfOneReplicaAloneIsAnErrorOnEveryRank) {
  on_replicas([](int64_t replica, Pair& model) {
    const auto backward = [&] { model(torch::ones({2, 4})).sum().backward(); };
    backward();
    {
      const torch::NoGradGuard no_grad;
      if (replica == 0) model->second->parameters()[1].mul_(2);
    }
    EXPECT_THAT(message_of(backward),
                AllOf(HasSubstr("not all replicas wrote"), HasSubstr("written on rank ")));
  });
}

// One replica gathers between two writes, so it counts more of them than the others.
TEST_P(SkippedWritesOfReplicas, AreNotTheGathersOfAReplicaThatEvaluatesAlone) {
  on_replicas([](int64_t replica, Pair& model) {
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      train_once(model, optimizer);
      const torch::NoGradGuard no_grad;
      for (int write = 0; write < 2; ++write) {
        if (replica == 0) model(torch::ones({2, 4}));
        for (auto& parameter : model->parameters()) parameter.mul_(0.5);
      }
    }
  });
}

TEST_P(SkippedWritesOfReplicas, AreNotStepsThatAllLeaveOutOrBackwardsWithoutSynchronisation) {
  on_replicas([](int64_t, Pair& model) {
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      {
        const NoSyncGuard no_sync(get_fsdp_module(*model));
        model(torch::ones({2, 4})).sum().backward();
      }
      train_once(model, optimizer, /*skips=*/step == 1);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, SkippedWritesOfReplicas,
                         ::testing::Values(ReplicaShape{2, 1}, ReplicaShape{3, 1},
                                           ReplicaShape{2, 2}, ReplicaShape{2, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.replicas) + "x" +
                                  std::to_string(info.param.shards);
                         });

// Two rows over three shards: a rank that holds nothing learns of it from its replica.
TEST(SkippedWritesOfReplicasWithEmptyShards, AreErrorsOnTheRanksThatHoldNothingToo) {
  run_ranks(6, [](int64_t rank) {
    auto model = sharded(Pair(2, 2, 2), init_device_mesh(torch::kCPU, {2, 3}));
    const auto train = [&](bool skips) {
      model(torch::ones({1, 2})).sum().backward();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        const bool holds_some = DTensor(parameter.detach()).to_local().numel() > 0;
        if (!skips && holds_some) parameter.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad().reset();
      }
    };
    for (int step = 0; step < 2; ++step) train(false);
    train(/*skips=*/rank >= 3);
    EXPECT_THAT(message_of([&] { train(false); }), HasSubstr("not all replicas wrote")) << rank;
  });
}

// Four rows over three ranks: the last holds nothing, and has nothing to write, where a
// touch is collective.
TEST(WritesThatMayBeLeftOut, OfEmptyShardsOverGloo) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    Pair plain(4, 4, 4);
    auto model = sharded(Pair(4, 4, 4), mesh);
    for (int step = 0; step < 3; ++step) {
      for (auto* each : {&plain, &model}) {
        (*each)(torch::ones({2, 4})).pow(2).mean().backward();
        const torch::NoGradGuard no_grad;
        for (auto& parameter : (*each)->parameters()) {
          const bool holds_some =
              !is_dtensor(parameter) || DTensor(parameter.detach()).to_local().numel() > 0;
          if (holds_some) parameter.sub_(parameter.grad(), 0.1);
          parameter.mutable_grad().reset();
        }
      }
    }
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(full_value(model->parameters()[i]).allclose(plain->parameters()[i])) << i;
  });
}

// Where ranks read by themselves, what a rank has written tells which values it wants.
TEST(WritesThatMayBeLeftOut, AreNamedWhereRanksShareMemory) {
  on_ranks_of(3, [](const DeviceMesh& mesh) {
    auto model = sharded(Pair(4, 4, 4), mesh);
    EXPECT_THAT(message_of([&] {
                  for (int step = 0; step < 3; ++step) {
                    model(torch::ones({2, 4})).sum().backward();
                    const torch::NoGradGuard no_grad;
                    for (auto& entry : model->parameters()) {
                      if (DTensor(entry.detach()).to_local().numel() > 0) entry.mul_(0.5);
                    }
                  }
                }),
                AnyOf(HasSubstr("have not written them alike"), HasSubstr("failed before"),
                      HasSubstr("write operators made them")));
  });
}

class LegalWrites : public Worlds {};

class LegalWritesOverGloo : public Worlds {
 private:
  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // where a touch is collective
};

TEST_P(LegalWritesOverGloo, MayBeOfDifferentOperatorsAndNumbersOnEachRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      train_once(model, optimizer);
      const torch::NoGradGuard no_grad;
      for (int64_t again = 0; again < rank; ++again) model->first->parameters()[0].mul_(1);
    }
  });
}

TEST_P(LegalWrites, OfFrozenAndUntouchedUnitsAndOfLoadedOnes) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    for (auto& parameter : model->second->parameters()) parameter.set_requires_grad(false);
    torch::optim::AdamW optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) train_once(model, optimizer);
    for (auto& parameter : model->second->parameters()) parameter.set_requires_grad(true);
    optimizer.zero_grad();
    model->first(torch::ones({2, 4})).sum().backward();
    optimizer.step();  // skips what has no gradient, alike
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.copy_(torch::ones(parameter.sizes()));
      model->first->weight.mul_(0.5);
    }
    for (int step = 0; step < 2; ++step) train_once(model, optimizer);
    const SummonFullParams full(model);
  });
}

TEST_P(LegalWrites, BetweenBackwardsWithoutSynchronisation) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = six_row_pair(mesh);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      {
        const NoSyncGuard no_sync(get_fsdp_module(*model));
        model(torch::ones({2, 4})).sum().backward();
      }
      train_once(model, optimizer);
    }
  });
}

INSTANTIATE_WORLDS(LegalWrites, 1, 2, 3);
INSTANTIATE_WORLDS(LegalWritesOverGloo, 2, 3);

TEST(LegalWritesOfReplicas, AndOfNeighboursThatKeepAPart) {
  run_ranks(4, [](int64_t) {
    for (const auto& mesh :
         {init_device_mesh(torch::kCPU, {2, 2}), init_device_mesh(torch::kCPU, {4})}) {
      FullyShardOptions options;
      if (mesh.ndim() == 1) options.reshard_after_forward = ReshardAfterForward::to_world(2);
      auto model = six_row_pair(mesh, options);
      torch::optim::AdamW optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) train_once(model, optimizer);
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
