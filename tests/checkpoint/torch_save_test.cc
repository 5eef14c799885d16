// LibTorch's own torch::save and torch::load of sharded models and optimizers.
#include "checkpoint/optimizer_state_dict.h"
#include "dtensor/redistribute/comm_listener.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/summon_full_params.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

// Uneven over two ranks; one storage of the shards is much larger than each parameter.
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl()
      : first(register_module("first", torch::nn::Linear(64, 301))),
        last(register_module("last", torch::nn::Linear(301, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(first(x).tanh()); }
  torch::nn::Linear first, last;
};
TORCH_MODULE(TwoLayers);

struct Trained {
  explicit Trained(int64_t world) {
    if (world > 0) fully_shard(model, init_device_mesh(torch::kCPU, {world}));
    torch::NoGradGuard no_grad;  // the same values on ranks that are threads
    for (auto& each : model->parameters()) {
      each.copy_(torch::linspace(-0.1, 0.1, each.numel()).view(each.sizes()));
    }
    optimizer.emplace(model->parameters(), AdamWOptions(1e-2));
  }
  void step() {
    optimizer->zero_grad();
    model->forward(torch::ones({2, 64})).pow(2).mean().backward();
    optimizer->step();
  }
  TwoLayers model;
  std::optional<AdamW> optimizer;
};

void save_both(Trained& trained, const std::string& path) {
  torch::save(trained.model, path + ".model");
  torch::save(*trained.optimizer, path + ".optimizer");
}

// What LibTorch reads from the files is what `trained` has, and a plain run steps on.
void expect_in_files(Trained& trained, const std::string& path) {
  Trained plain(0);
  torch::load(plain.model, path + ".model");
  torch::load(*plain.optimizer, path + ".optimizer");
  const auto want = trained.model->parameters(), have = plain.model->parameters();
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(torch::equal(have[i], full_value(want[i]))) << i;
    const auto state_of = [&](Trained& run, const at::Tensor& parameter) -> AdamWParamState& {
      auto& state = *run.optimizer->state().at(parameter.unsafeGetTensorImpl());
      return static_cast<AdamWParamState&>(state);
    };
    auto &its = state_of(trained, want[i]), &read = state_of(plain, have[i]);
    EXPECT_TRUE(torch::equal(read.exp_avg(), full_value(its.exp_avg()))) << i;
    EXPECT_TRUE(torch::equal(read.exp_avg_sq(), full_value(its.exp_avg_sq()))) << i;
    EXPECT_EQ(read.step(), its.step());
  }
  plain.step();
  const auto size_of = [&](const std::string& kind) {
    return static_cast<int64_t>(std::filesystem::file_size(path + kind));
  };
  constexpr int64_t kBytes = 4 * (64 * 301 + 301 + 301 * 3 + 3);
  EXPECT_LT(size_of(".model"), kBytes + 20'000);
  EXPECT_LT(size_of(".optimizer"), 2 * kBytes + 20'000);
}

TEST(TorchSave, OfAShardedModelOnOneRankWritesWholeValues) {
  TemporaryFolder folder;
  run_ranks(1, [&](int64_t) {
    Trained trained(1);
    for (int i = 0; i < 2; ++i) {  // what was written changes
      trained.step();
      save_both(trained, folder / "saved");
      expect_in_files(trained, folder / "saved");
    }
  });
}

TEST(TorchSave, WhileParametersAreSummonedWritesTheModelsWholeValues) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    Trained trained(2), plain(0);
    trained.step();
    const std::string path = folder / ("saved" + std::to_string(rank));
    {
      const SummonFullParams full(trained.model);
      torch::save(trained.model, path);
    }
    torch::load(plain.model, path);
    const auto want = trained.model->parameters(), have = plain.model->parameters();
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_TRUE(torch::equal(have[i], full_value(want[i]))) << i;
    }
  });
}

TEST(TorchSave, OfSharesNamesTheLineThatSaves) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    Trained trained(2);
    trained.step();
    const std::string path = folder / ("saved" + std::to_string(rank));
    const auto way_out = HasSubstr("fsdp::save({.model = model, .optimizer = optimizer}");
    EXPECT_THAT(message_of([&] { torch::save(trained.model, path); }), way_out);
    EXPECT_THAT(message_of([&] { torch::save(*trained.optimizer, path); }), way_out);
    const SummonFullParams full(trained.model);
    EXPECT_THAT(message_of([&] { torch::save(*trained.optimizer, path); }), way_out);
  });
}

// Its states are plain and whole, of which a step takes this rank's part.
TEST(TorchLoad, OfAnUnshardedRunsModelAndOptimizerStepsOn) {
  TemporaryFolder folder;
  Trained plain(0);
  plain.step();
  save_both(plain, folder / "plain");
  plain.step();
  for (const int64_t world : {1, 2}) {
    run_ranks(world, [&](int64_t) {
      Trained sharded(world);
      torch::load(sharded.model, folder / "plain.model");
      torch::load(*sharded.optimizer, folder / "plain.optimizer");
      sharded.step();
      const auto want = plain.model->parameters(), have = sharded.model->parameters();
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(torch::allclose(full_value(have[i]), want[i])) << i;
      }
    });
  }
}

// How often a step of the optimizer moves data between ranks.
int64_t movements_of_step(torch::optim::Optimizer& optimizer) {
  int64_t count = 0;
  const internal::CommListener listener([&](const internal::CommEvent&) { ++count; });
  optimizer.step();
  return count;
}

void step_with(torch::optim::Optimizer& optimizer, TwoLayers& model) {
  optimizer.zero_grad();
  model->forward(torch::ones({2, 64})).pow(2).mean().backward();
  optimizer.step();
}

// An unsharded run, two steps of which are loaded the plain way, for a third.
template <class Optimizer, class Options>
void expect_parts_step_on(const Options& options) {
  TemporaryFolder folder;
  Trained plain(0);
  Optimizer of_plain(plain.model->parameters(), options);
  for (int i = 0; i < 2; ++i) step_with(of_plain, plain.model);
  torch::save(plain.model, folder / "model");
  torch::save(of_plain, folder / "optimizer");
  step_with(of_plain, plain.model);
  run_ranks(2, [&](int64_t) {
    for (const bool keeps_part : {false, true}) {
      Trained sharded(2);
      Optimizer optimizer(sharded.model->parameters(), options);
      torch::load(sharded.model, folder / "model");
      torch::load(optimizer, folder / "optimizer");
      if (keeps_part) shard_full_optimizer_state(optimizer);
      sharded.model->forward(torch::ones({2, 64})).pow(2).mean().backward();
      EXPECT_EQ(movements_of_step(optimizer) == 0, keeps_part);
      const auto want = plain.model->parameters(), have = sharded.model->parameters();
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(torch::allclose(full_value(have[i]), want[i])) << i << keeps_part;
    }
  });
}

TEST(TorchLoad, OfWholeStatesKeepsThisRanksPart) {
  expect_parts_step_on<AdamW>(AdamWOptions(1e-2).amsgrad(true));
  expect_parts_step_on<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_parts_step_on<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(1e-2).momentum(0.9).centered(true));
  expect_parts_step_on<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2));
}

}  // namespace
}  // namespace fsdp::testing
