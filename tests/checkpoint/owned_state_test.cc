// State that lies on the rank that computes with it comes back to the owners of another
// world, from files and in memory, also where it has the shape of its parameter.
#include "checkpoint/checkpoint.h"
#include "checkpoint/optimizer_state_dict.h"
#include "dtensor/dtensor.h"
#include "examples/adam_8bit.h"
#include "examples/shampoo.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using examples::Adam8bit;
using examples::Shampoo;

// Square, wide and tall ones.
torch::nn::Sequential three_matrices() {
  const auto layer = [](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  return torch::nn::Sequential(layer(6, 6), layer(6, 4), layer(4, 9));
}

template <class Optimizer>
struct OwnedTraining {
  explicit OwnedTraining(const std::vector<int64_t>& mesh_shape) : model(three_matrices()) {
    if (!mesh_shape.empty()) fully_shard(model, init_device_mesh(c10::kCPU, mesh_shape));
    const torch::NoGradGuard no_grad;
    for (const auto& param : model->parameters()) param.copy_(placed(param, 1));
    optimizer = std::make_unique<Optimizer>(model->parameters(), typename Optimizer::Options(1e-2));
  }

  static torch::Tensor placed(const torch::Tensor& param, double seed) {
    return placed_like(param, values_of(param.sizes().vec(), seed));
  }

  void step(double seed) {
    for (const auto& param : model->parameters()) param.mutable_grad() = placed(param, seed);
    optimizer->step();
  }

  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> values;
    for (const auto& param : model->parameters()) values.push_back(full_value(param.detach()));
    return values;
  }

  torch::nn::Sequential model;
  std::unique_ptr<Optimizer> optimizer;
};

void expect_equal_lists(const std::vector<torch::Tensor>& actual,
                        const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "parameter " << i;
}

const std::vector<std::vector<int64_t>> kOwnedMeshes = {{}, {1}, {2}, {3}, {2, 2}};

template <class Optimizer>
std::vector<torch::Tensor> values_of_straight_run() {
  OwnedTraining<Optimizer> straight({});
  straight.step(10);
  straight.step(20);
  return straight.values();
}

template <class Optimizer>
void expect_resumes_at_any_world() {
  const auto expected = values_of_straight_run<Optimizer>();
  for (const auto& from : kOwnedMeshes) {
    const TemporaryFolder folder;
    const std::string path = folder / "saved";
    run_ranks(c10::multiply_integers(from), [&](int64_t) {
      OwnedTraining<Optimizer> training(from);
      training.step(10);
      save({.model = training.model, .optimizer = training.optimizer}, path);
    });
    verify_checkpoint(path);
    for (const auto& to : kOwnedMeshes) {
      run_ranks(c10::multiply_integers(to), [&](int64_t) {
        OwnedTraining<Optimizer> training(to);
        training.step(50);
        load({.model = training.model, .optimizer = training.optimizer}, path);
        training.step(20);
        expect_equal_lists(training.values(), expected);
      });
    }
  }
}

TEST(OwnedState, OfShampooResumesAtAnyWorld) { expect_resumes_at_any_world<Shampoo>(); }
TEST(OwnedState, OfAdamInEightBitsResumesAtAnyWorld) { expect_resumes_at_any_world<Adam8bit>(); }

// What a rank has of it after loading: all or nothing.
TEST(OwnedState, ComesToItsOwnerAlone) {
  const TemporaryFolder folder;
  run_ranks(3, [&](int64_t) {
    OwnedTraining<Shampoo> training({3});
    training.step(10);
    save({.model = training.model, .optimizer = training.optimizer}, folder / "saved");
    load({.model = training.model, .optimizer = training.optimizer}, folder / "saved");
    for (const auto& [handle, state] : training.optimizer->state()) {
      const auto& factors = static_cast<const examples::ShampooParamState&>(*state);
      for (const auto& factor : {factors.left(), factors.right()}) {
        ASSERT_TRUE(is_dtensor(factor));
        const auto held = OwnedStep::local(factor).numel();
        EXPECT_TRUE(held == 0 || held == factor.numel());
      }
    }
  });
}

template <class Optimizer>
void expect_travels_in_memory(const StateDictOptions& get, const StateDictOptions& set) {
  const auto expected = values_of_straight_run<Optimizer>();
  run_ranks(2, [&](int64_t) {
    OwnedTraining<Optimizer> from({2}), to({2});
    from.step(10);
    to.step(50);
    const auto state = get_optimizer_state_dict(*from.model, *from.optimizer, get);
    set_model_state_dict(*to.model, get_model_state_dict(*from.model, get), set);
    set_optimizer_state_dict(*to.model, *to.optimizer, state, set);
    to.step(20);
    expect_equal_lists(to.values(), expected);
  });
}

TEST(OwnedState, TravelsInMemoryDistributedWholeAndInParts) {
  const std::vector<std::pair<StateDictOptions, StateDictOptions>> ways = {
      {{}, {}},
      {{.full_state_dict = true}, {.full_state_dict = true}},
      {{.full_state_dict = true, .cpu_offload = true},
       {.full_state_dict = true, .broadcast_from_rank0 = true}},
      {{.local = true}, {.local = true}}};
  for (const auto& [get, set] : ways) {
    expect_travels_in_memory<Shampoo>(get, set);
    expect_travels_in_memory<Adam8bit>(get, set);
  }
}

}  // namespace
}  // namespace fsdp::testing
