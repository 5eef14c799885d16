// Optimizers and schedulers: training goes on as if it had not stopped.
#include "checkpoint/checkpoint.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>

namespace fsdp::testing {
namespace {

using namespace torch::optim;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<torch::Tensor>)>;

// A user's own optimizer, written with LibTorch's macros.
struct LionOptions : OptimizerCloneableOptions<LionOptions> {
  explicit LionOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  }
};
struct LionParamState : OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(torch::Tensor, momentum);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, momentum);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  }
};
struct Lion : Optimizer {
  Lion(std::vector<torch::Tensor> params, LionOptions options)
      : Optimizer(std::move(params), std::make_unique<LionOptions>(options)) {}
  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (auto& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& state = state_[param.unsafeGetTensorImpl()];
        if (!state) {
          auto fresh = std::make_unique<LionParamState>();
          fresh->momentum(torch::zeros_like(param));
          state = std::move(fresh);
        }
        auto& momentum = static_cast<LionParamState&>(*state).momentum();
        momentum.mul_(0.9).add_(param.grad(), 0.1);
        param.sub_(momentum, group.options().get_lr());
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
  }
};

template <class Optim, class Options>
MakeOptimizer with(Options options) {
  return [options](std::vector<torch::Tensor> params) {
    return std::make_unique<Optim>(std::move(params), options);
  };
}

struct ScheduledTraining {
  ScheduledTraining(const MakeOptimizer& make, int64_t world, int64_t seed) {
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, seed);
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.mul_(1e-4);
    model->eval();  // no dropout: ranks that are threads share its generator
    optimizer = make(model->parameters());
    scheduler = std::make_unique<StepLR>(*optimizer, /*step_size=*/2, /*gamma=*/0.5);
  }
  void steps(int64_t from, int64_t to, int64_t rank) {
    for (int64_t step = from; step < to; ++step) {
      const auto x = torch::arange(20, torch::kFloat).view({4, 5}).add(step + rank).mul(0.01);
      optimizer->zero_grad();
      model->forward(x).pow(2).mean().backward();
      optimizer->step();
      scheduler->step();
    }
  }
  SmallModel model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<StepLR> scheduler;
};

void expect_same(ScheduledTraining& a, ScheduledTraining& b, const std::string& what) {
  const auto want = full_values(*b.model);
  for (const auto& item : full_values(*a.model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << what << ": " << item.key();
    EXPECT_TRUE(torch::isfinite(item.value()).all().item<bool>()) << what << ": " << item.key();
  }
}

void expect_bit_equal_resume(const std::string& what, const MakeOptimizer& make) {
  for (const int64_t stop : {0, 3}) {
    TemporaryFolder folder;
    run_ranks(2, [&](int64_t rank) {
      ScheduledTraining straight(make, 2, 1);
      straight.steps(0, stop, rank);
      save({.model = straight.model,
            .optimizer = straight.optimizer,
            .scheduler = *straight.scheduler,
            .values = {{"step", stop}}},
           folder / "saved");
      straight.steps(stop, 6, rank);
      ScheduledTraining resumed(make, 2, 7);
      resumed.steps(0, 1, rank);  // state that must go
      const auto loaded = load(
          {.model = resumed.model, .optimizer = resumed.optimizer, .scheduler = *resumed.scheduler},
          folder / "saved");
      resumed.steps(loaded.values.at("step").toInt(), 6, rank);
      expect_same(resumed, straight, what + " stopped at " + std::to_string(stop));
    });
  }
}

TEST(Resume, AdamW) {
  expect_bit_equal_resume("AdamW", with<AdamW>(AdamWOptions(1e-2).amsgrad(true)));
}
TEST(Resume, Adam) {
  expect_bit_equal_resume("Adam", with<Adam>(AdamOptions(1e-2).betas({0.8, 0.9})));
}
TEST(Resume, SgdWithAndWithoutMomentum) {
  expect_bit_equal_resume("momentum", with<SGD>(SGDOptions(1e-6).momentum(0.9)));
  expect_bit_equal_resume("plain", with<SGD>(SGDOptions(1e-6)));
}
TEST(Resume, RmsProp) {
  expect_bit_equal_resume("RMSprop",
                          with<RMSprop>(RMSpropOptions(1e-2).momentum(0.9).centered(true)));
}
TEST(Resume, Adagrad) {
  expect_bit_equal_resume("Adagrad", with<Adagrad>(AdagradOptions(1e-2).lr_decay(0.1)));
}
TEST(Resume, AUsersOwnOptimizer) { expect_bit_equal_resume("Lion", with<Lion>(LionOptions(1e-2))); }

TEST(Resume, TwoGroupsKeepTheirOptions) {
  const MakeOptimizer make = [](std::vector<torch::Tensor> params) {
    std::vector<torch::Tensor> weights, others;
    for (const auto& each : params) (each.dim() > 1 ? weights : others).push_back(each);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(weights, std::make_unique<AdamWOptions>(AdamWOptions(1e-2)));
    groups.emplace_back(others, std::make_unique<AdamWOptions>(AdamWOptions(1e-3).weight_decay(0)));
    return std::make_unique<AdamW>(groups, AdamWOptions(1.0));
  };
  expect_bit_equal_resume("two groups", make);
}

// Each rank draws masks of its own from its generator, which goes on where it was.
const ChildCase kDropout("checkpoint_dropout", [] {
  init_process_group({.timeout = std::chrono::seconds(60)});
  const int64_t world = default_process_group()->getSize();
  const int64_t rank = default_process_group()->getRank();
  const std::string path = std::getenv("RESUME_PATH");
  const MakeOptimizer make = with<AdamW>(AdamWOptions(1e-2));
  torch::manual_seed(100 + rank);
  ScheduledTraining straight(make, world, 1);
  straight.model->train();
  straight.steps(0, 3, rank);
  save({.model = straight.model,
        .optimizer = straight.optimizer,
        .scheduler = *straight.scheduler,
        .rng = true},
       path);
  straight.steps(3, 6, rank);
  const auto want = full_values(*straight.model);
  const auto is_same_after_resuming = [&](bool rng) {
    ScheduledTraining resumed(make, world, 5);
    resumed.model->train();
    const auto& [model, optimizer, scheduler] = resumed;
    load({.model = model, .optimizer = optimizer, .scheduler = *scheduler, .rng = rng}, path);
    resumed.steps(3, 6, rank);
    const auto got = full_values(*resumed.model);
    return std::all_of(want.begin(), want.end(), [&](const auto& item) {
      // Running statistics are each rank's own, and rank 0's are saved.
      return item.key().starts_with("norm.running") || torch::equal(got[item.key()], item.value());
    });
  };
  const bool with_rng = is_same_after_resuming(true), without = is_same_after_resuming(false);
  destroy_process_group();
  return with_rng && !without ? 0 : 1;
});

TEST(Resume, WithDropoutIsBitEqualWhereTheGeneratorsAreSaved) {
  for (const int64_t world : {2, 3}) {
    TemporaryFolder folder;
    const auto ends = run_processes("checkpoint_dropout", world, std::chrono::seconds(60),
                                    {{"RESUME_PATH", folder / "saved"}});
    for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
  }
}

// What `to` ranks have after loading equals what `from` ranks had, and goes on so.
TEST(Resume, EveryWorldGetsTheStateOfEveryOther) {
  const MakeOptimizer make = with<AdamW>(AdamWOptions(1e-2));
  for (const int64_t from : {1, 2, 3, 4}) {
    TemporaryFolder folder;
    run_ranks(from, [&](int64_t rank) {
      ScheduledTraining training(make, from, 1);
      training.steps(0, 2, rank);
      save({.model = training.model, .optimizer = training.optimizer}, folder / "saved");
    });
    ScheduledTraining alone(make, 1, 3);  // a world of one without a process group
    load({.model = alone.model, .optimizer = alone.optimizer}, folder / "saved");
    destroy_process_group();
    for (const int64_t to : {2, 3, 4}) {
      run_ranks(to, [&](int64_t) {
        ScheduledTraining training(make, to, 5);
        load({.model = training.model, .optimizer = training.optimizer}, folder / "saved");
        const auto entries = training.model->named_parameters();
        const auto expected = alone.model->named_parameters();
        for (const auto& item : entries) {
          const auto& other = expected[item.key()];
          const auto state = training.optimizer->state().find(item->unsafeGetTensorImpl());
          const auto their = alone.optimizer->state().find(other.unsafeGetTensorImpl());
          ASSERT_EQ(state == training.optimizer->state().end(),
                    their == alone.optimizer->state().end());
          if (state == training.optimizer->state().end()) continue;
          const auto& mine = static_cast<AdamWParamState&>(*state->second);
          const auto& theirs = static_cast<AdamWParamState&>(*their->second);
          EXPECT_EQ(mine.step(), theirs.step());
          const auto average = full_value(mine.exp_avg());
          EXPECT_TRUE(torch::equal(average, DTensor(theirs.exp_avg()).to_local())) << item.key();
        }
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
