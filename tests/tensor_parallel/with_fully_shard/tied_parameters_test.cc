// An embedding and a head that are one parameter, row-wise and column-wise, cut over "tp"
// and sharded over "dp": what a training loop does with them.
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/communication_log.h"
#include "tests/support/head.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/mesh_settings.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <functional>
#include <optional>

namespace fsdp::testing {
namespace {

constexpr int64_t kVocab = 67, kTieWidth = 8;

struct TiedLmImpl : torch::nn::Module {
  using Run = std::function<torch::Tensor(const torch::Tensor&)>;

  torch::Tensor forward(const torch::Tensor& tokens) {
    const Run mlp = [this](const torch::Tensor& x) { return down(torch::gelu(up(norm(x)))); };
    const auto x = table(tokens);
    return head(x + (around_mlp ? around_mlp(mlp, x) : mlp(x)));
  }
  std::function<torch::Tensor(const Run&, const torch::Tensor&)> around_mlp;

  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kVocab, kTieWidth));
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kTieWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kTieWidth, 10));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(10, kTieWidth));
  Head head = register_module("head", Head(table->weight));
};
TORCH_MODULE(TiedLm);

ParallelPlan tied_plan(bool cut_sequence) {
  const Placement between = cut_sequence ? Placement(Shard{1}) : Replicate{};
  ParallelPlan plan = {{"table", RowwiseParallel{.output_layout = between}},
                       {"up", ColwiseParallel{}},
                       {"down", RowwiseParallel{.output_layout = between}},
                       {"head", ColwiseParallel{}}};
  if (cut_sequence) plan.emplace_back("norm", SequenceParallel{});
  return plan;
}

struct TiedPair {
  TiedLm plain, sharded;
  at::Tensor text;  // [data ranks, batch, tokens + 1]
  int64_t data_rank;

  TiedPair(const DeviceMesh& mesh, bool cut_sequence)
      : plain(drawn(1, [] { return TiedLm(); })),
        sharded(drawn(1, [] { return TiedLm(); })),
        text(
            (drawn_tensor(2, {mesh["dp"].size(), 2, 6}) * 1000).to(torch::kLong).remainder(kVocab)),
        data_rank(mesh["dp"].local_rank()) {
    parallelize_module(sharded, mesh["tp"], tied_plan(cut_sequence));
    fully_shard(sharded, mesh["dp"]);
  }

  static at::Tensor loss(TiedLm& model, const at::Tensor& of) {
    return transformer_loss(model->forward(of.narrow(-1, 0, 5)), of.narrow(-1, 1, 5));
  }
  at::Tensor plain_loss() { return loss(plain, text.flatten(0, 1)); }
  at::Tensor sharded_loss() { return loss(sharded, text[data_rank]); }
  void backward() {
    plain_loss().backward();
    sharded_loss().backward();
  }
  void expect_same(double tolerance = kClose) {
    expect_same_gradients(*sharded, *plain, tolerance);
    EXPECT_TRUE(sharded->named_parameters()["table.weight"].is_same(
        sharded->named_parameters()["head.weight"]));
  }
};

class ShardedTies : public OnMeshes {
 protected:
  static void on_pairs_with_ties(const std::function<void(TiedPair&)>& body) {
    on_ranks([&](const DeviceMesh& mesh) {
      TiedPair pair(mesh, cuts_sequence());
      body(pair);
    });
  }
};

TEST_P(ShardedTies, TrainAsOnOneDevice) {
  on_pairs_with_ties([](TiedPair& pair) {
    expect_same_adamw_steps(*pair.sharded, *pair.plain, 3, [&](int step) {
      {
        const RedistributionPolicy policy(step == 0 ? Redistribution::kExplicit
                                                    : Redistribution::kAllow);  // both styles act
        pair.backward();
      }
      pair.expect_same(step == 0 ? kClose : kCloseLater);
    });
  });
}

TEST_P(ShardedTies, AddUpGradientsWithAndWithoutSynchronisation) {
  on_pairs_with_ties([](TiedPair& pair) {
    for (int batch = 0; batch < 3; ++batch) {
      std::optional<NoSyncGuard> no_sync;
      if (batch < 2) no_sync.emplace(get_fsdp_module(*pair.sharded));
      pair.backward();
      pair.text = pair.text.flip(2);
    }
    pair.expect_same();
  });
}

TEST_P(ShardedTies, GiveTheirGradientsAgainFromAGraphThatIsKept) {
  on_pairs_with_ties([](TiedPair& pair) {
    const at::Tensor wanted = pair.plain_loss(), found = pair.sharded_loss();
    for (const bool keep : {true, false}) {
      wanted.backward({}, keep);
      found.backward({}, keep);
    }
    pair.expect_same();
  });
}

TEST_P(ShardedTies, HaveNoGradientWhileFrozen) {
  on_pairs_with_ties([](TiedPair& pair) {
    for (auto model : {pair.plain, pair.sharded})
      model->named_parameters()["table.weight"].requires_grad_(false);
    pair.backward();
    EXPECT_FALSE(pair.sharded->named_parameters()["head.weight"].grad().defined());
    pair.expect_same();
    for (auto model : {pair.plain, pair.sharded}) {
      model->zero_grad();
      model->named_parameters()["table.weight"].requires_grad_(true);
    }
    pair.backward();
    EXPECT_TRUE(pair.sharded->named_parameters()["head.weight"].grad().defined());
    pair.expect_same();
  });
}

TEST_P(ShardedTies, AreRightBesideARegionThatRunsAgain) {
  on_pairs_with_ties([](TiedPair& pair) {
    int runs = 0;
    pair.sharded->around_mlp = [&](const auto& mlp, const at::Tensor& x) {
      return checkpoint(
          [&runs, mlp](const at::Tensor& input) {
            ++runs;
            return mlp(input);
          },
          x);
    };
    pair.backward();
    EXPECT_EQ(runs, 2);
    pair.expect_same();
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ShardedTies, ::testing::ValuesIn(every_mesh()), name_of_mesh);

}  // namespace
}  // namespace fsdp::testing
