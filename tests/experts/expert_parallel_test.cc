// Mixtures of experts whose experts are cut over "ep" and sharded over "efsdp", the rest
// of the model over both, beside one device that has all of it and the whole batch.
#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "experts/route_to_experts.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/parallelize_module.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using at::Tensor;

constexpr int64_t kModelWidth = 6, kHidden = 5, kTop = 2;

// All experts' weights in one tensor each.
class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(int64_t count)
      : up(register_parameter("up", torch::randn({count, kHidden, kModelWidth}))),
        down(register_parameter("down", torch::randn({count, kModelWidth, kHidden}))) {}
  Tensor forward(const Tensor& rows, const Tensor& counts) {
    return grouped_linear(grouped_linear(rows, counts, up).tanh(), counts, down);
  }
  Tensor up, down;
};
TORCH_MODULE(Experts);

class MixtureImpl : public torch::nn::Module {
 public:
  explicit MixtureImpl(int64_t count)
      : gate(register_module("gate", torch::nn::Linear(kModelWidth, count))),
        experts(register_module("experts", Experts(count))),
        head(register_module("head", torch::nn::Linear(kModelWidth, 3))),
        count_(count) {}
  // x: [tokens, width]
  Tensor forward(const Tensor& x) {
    auto [weights, chosen] = gate(x).softmax(-1).topk(std::min(kTop, count_), -1);
    return head(x + (mesh ? routed(x, chosen, weights) : on_this_rank(x, chosen, weights)));
  }
  torch::nn::Linear gate;
  Experts experts;
  torch::nn::Linear head;
  std::optional<DeviceMesh> mesh;  // of the experts

 private:
  Tensor routed(const Tensor& x, const Tensor& chosen, const Tensor& weights) {
    return route_to_experts(
        x, {.experts = chosen, .weights = weights, .count = count_}, *mesh,
        [&](const Tensor& rows, const Tensor& counts) { return experts(rows, counts); });
  }
  // Every expert computes every token.
  Tensor on_this_rank(const Tensor& x, const Tensor& chosen, const Tensor& weights) {
    Tensor sum = torch::zeros_like(x);
    for (int64_t e = 0; e < count_; ++e) {
      const Tensor made = torch::linear(torch::linear(x, experts->up[e]).tanh(), experts->down[e]);
      sum = sum + made * (weights * (chosen == e)).sum(-1, true);
    }
    return sum;
  }
  int64_t count_;
};
TORCH_MODULE(Mixture);

// Experts over "ep", copies of them sharded over "efsdp", and the rest over both.
void shard(Mixture& model, const DeviceMesh& mesh) {
  model->mesh = mesh["ep"];
  parallelize_module(model, mesh["ep"], {{"experts", ExpertParallel{}}});
  fully_shard(model->experts, mesh["efsdp"]);
  fully_shard(model, mesh.flatten({"efsdp", "ep"}, "dp")["dp"]);
}

struct Setting {
  int64_t efsdp, ep, experts;
};

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return "Efsdp" + std::to_string(info.param.efsdp) + "Ep" + std::to_string(info.param.ep) +
         "Experts" + std::to_string(info.param.experts);
}

class ExpertParallelism : public ::testing::TestWithParam<Setting> {
 protected:
  static Mixture model() {
    return drawn(3, [] { return Mixture(GetParam().experts); });
  }
  static DeviceMesh mesh() {
    return init_device_mesh(c10::kCPU, {GetParam().efsdp, GetParam().ep}, {"efsdp", "ep"});
  }
};

TEST_P(ExpertParallelism, StepsEqualOneDevice) {
  run_ranks(GetParam().efsdp * GetParam().ep, [&](int64_t rank) {
    const auto of = mesh();
    Mixture plain = model(), sharded = model();
    shard(sharded, of);
    constexpr int64_t kTokens = 7;
    const Tensor batch = drawn_tensor(4, {of.size(), kTokens, kModelWidth});
    expect_same_adamw_steps(*sharded, *plain, 3, [&](int step) {
      plain->forward(batch.flatten(0, 1)).square().mean().backward();
      sharded->forward(batch[rank]).square().mean().backward();
      expect_same_gradients(*sharded, *plain, step == 0 ? kClose : kCloseLater);
      const Tensor wanted = torch::tensor(
          torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1), torch::kFloat64);
      EXPECT_LE(distance(clip_grad_norm_(sharded->parameters(), 0.1), wanted), kCloseLater);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExpertParallelism,
                         ::testing::Values(Setting{1, 1, 3}, Setting{1, 2, 4}, Setting{2, 1, 3},
                                           Setting{2, 2, 4}, Setting{1, 3, 4}, Setting{3, 1, 1},
                                           Setting{2, 2, 1}, Setting{1, 4, 6}),
                         name_of);

// A checkpoint of experts goes on on other ranks, of experts cut otherwise, and on one.
struct Move {
  std::vector<int64_t> from, to;  // efsdp x ep
};

class ExpertCheckpoints : public ::testing::TestWithParam<Move> {
 protected:
  static Mixture sharded_over(const std::vector<int64_t>& shape) {
    Mixture model = drawn(3, [] { return Mixture(4); });
    shard(model, init_device_mesh(c10::kCPU, shape, {"efsdp", "ep"}));
    return model;
  }
  static torch::optim::AdamW adamw(const Mixture& model) {
    return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-3));
  }
  // Of the batch of all ranks, of which each has as many rows.
  static void step(Mixture& model, torch::optim::Optimizer& optimizer, int number, int64_t rank,
                   int64_t ranks) {
    const Tensor batch = drawn_tensor(number, {24, kModelWidth});
    optimizer.zero_grad();
    model->forward(batch.chunk(ranks)[rank]).square().mean().backward();
    optimizer.step();
  }
};

TEST_P(ExpertCheckpoints, GoOnOnOtherRanks) {
  const TemporaryFolder folder;
  const auto& [from, to] = GetParam();
  const int64_t before = from[0] * from[1], after = to[0] * to[1];
  run_ranks(before, [&](int64_t rank) {
    Mixture model = sharded_over(from);
    auto optimizer = adamw(model);
    step(model, optimizer, 1, rank, before);
    save({.model = model, .optimizer = optimizer}, folder / "step");
  });
  run_ranks(after, [&](int64_t rank) {
    Mixture plain = drawn(3, [] { return Mixture(4); }), model = sharded_over(to);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.zero_();
    }
    auto theirs = adamw(plain), ours = adamw(model);
    load({.model = model, .optimizer = ours}, folder / "step");
    for (const int number : {1, 2}) {
      step(plain, theirs, number, 0, 1);
      if (number == 2) step(model, ours, number, rank, after);
      expect_same_values(*model, *plain, kCloseLater);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExpertCheckpoints,
                         ::testing::Values(Move{{2, 4}, {1, 2}}, Move{{2, 4}, {1, 1}},
                                           Move{{1, 3}, {2, 2}}, Move{{1, 1}, {2, 4}},
                                           Move{{2, 2}, {3, 2}}));

// As tensor parallelism cuts them, each expert along its width.
TEST(ExpertCheckpointsOfTensorParallelism, HaveTheSameValues) {
  const TemporaryFolder folder;
  run_ranks(4, [&](int64_t) {
    Mixture model = drawn(3, [] { return Mixture(4); });
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"efsdp", "ep"});
    parallelize_module(model, mesh["ep"], {{"experts", ExpertParallel{}}});
    fully_shard(model->experts, mesh["efsdp"]);
    save({.model = model}, folder / "step");
  });
  run_ranks(2, [&](int64_t) {
    Mixture plain = drawn(3, [] { return Mixture(4); }),
            model = drawn(4, [] { return Mixture(4); });
    parallelize_module(
        model, init_device_mesh(c10::kCPU, {2}, {"tp"}),
        {{"experts.up", ShardParameter{Shard{1}}}, {"experts.down", ShardParameter{Shard{2}}}});
    load({.model = model}, folder / "step");
    expect_same_values(*model, *plain, 0);
  });
}

// Batches that are cut over "cp", whose ranks have the experts too, or copies of them.
struct CutSetting {
  int64_t dp, cp;
  bool experts_over_cp;
};

class ExpertsOfCutBatches : public ::testing::TestWithParam<CutSetting> {};

TEST_P(ExpertsOfCutBatches, StepsEqualOneDevice) {
  const CutSetting& of = GetParam();
  run_ranks(of.dp * of.cp, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {of.dp, of.cp}, {"dp", "cp"});
    const auto make = [] { return Mixture(4); };
    Mixture plain = drawn(3, make), sharded = drawn(3, make);
    const std::string of_experts = of.experts_over_cp ? "cp" : "dp";
    sharded->mesh = mesh[of_experts];
    parallelize_module(sharded, mesh[of_experts], {{"experts", ExpertParallel{}}});
    fully_shard(sharded->experts, mesh[of.experts_over_cp ? "dp" : "cp"]);
    fully_shard(sharded, mesh.flatten({"dp", "cp"}, "data")["data"]);
    const Tensor batch = drawn_tensor(4, {of.dp, 7, kModelWidth});
    expect_same_adamw_steps(*sharded, *plain, 3, [&](int step) {
      plain->forward(batch.flatten(0, 1)).square().mean().backward();
      const Tensor own =
          distribute_tensor(batch[mesh.coordinate()[0]], mesh["cp"], {Shard{.dim = 0}});
      sharded->forward(own).square().mean().backward();
      expect_same_gradients(*sharded, *plain, step == 0 ? kClose : kCloseLater);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ExpertsOfCutBatches,
                         ::testing::Values(CutSetting{1, 2, true}, CutSetting{2, 2, true},
                                           CutSetting{2, 2, false}, CutSetting{1, 3, false},
                                           CutSetting{1, 3, true}, CutSetting{2, 1, true}),
                         [](const auto& info) {
                           return "Dp" + std::to_string(info.param.dp) + "Cp" +
                                  std::to_string(info.param.cp) +
                                  (info.param.experts_over_cp ? "OverCp" : "OverDp");
                         });

// Their entries say that they are trained, after steps in which they were not.
TEST(ExpertParallelUnits, FrozenExpertsAreTrainedOnceTheirEntriesAre) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"efsdp", "ep"});
    Mixture model = drawn(3, [] { return Mixture(4); });
    model->mesh = mesh["ep"];
    for (auto& parameter : model->experts->parameters()) parameter.requires_grad_(false);
    parallelize_module(model, mesh["ep"], {{"experts", ExpertParallel{}}});
    fully_shard(model->experts, mesh["efsdp"]);
    const Tensor batch = drawn_tensor(4, {7, kModelWidth});
    model->forward(batch).sum().backward();
    for (const auto& parameter : model->experts->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
      parameter.requires_grad_(true);
    }
    model->forward(batch).sum().backward();
    for (const auto& parameter : model->experts->parameters())
      EXPECT_TRUE(parameter.grad().defined());
  });
}

TEST(ExpertParallelUnits, KeepExpertsApart) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"efsdp", "ep"});
    Mixture model = drawn(3, [] { return Mixture(4); });
    parallelize_module(model, mesh["ep"], {{"experts", ExpertParallel{}}});
    expect_error<c10::ValueError>(
        [&] { fully_shard(model, mesh["efsdp"]); },
        ::testing::HasSubstr("give the module of the experts a unit of its own"));
  });
}

}  // namespace
}  // namespace fsdp::testing
