// What OwnedStep gives to whom, and optimizers written with it (examples/): however
// parameters are cut, their steps have the bits of the step of plain ones.
#include "optim/owned_step.h"

#include "dtensor/dtensor.h"
#include "examples/adam_8bit.h"
#include "examples/shampoo.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/placed_values.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using testing::expect_error;
using testing::full_value;
using ::testing::HasSubstr;
using testing::on_ranks_of;
using testing::run_ranks;
using testing::set_gradients;
using testing::set_values;
using testing::values_of;

using Cut = std::vector<Placement>;
const std::vector<std::vector<int64_t>> kMatrixShapes = {{8, 8}, {5, 7}, {1, 6}, {12, 3}, {20, 30}};

// Parameters of those shapes; no cuts: plain ones, else parameter i as cuts[i % size].
std::vector<torch::Tensor> params_cut(const std::vector<Cut>& cuts, const DeviceMesh* mesh) {
  std::vector<torch::Tensor> params;
  for (size_t i = 0; i < kMatrixShapes.size(); ++i) {
    torch::Tensor whole = torch::zeros(kMatrixShapes[i]);
    if (mesh != nullptr) whole = distribute_tensor(whole, *mesh, cuts[i % cuts.size()]);
    params.push_back(whole.requires_grad_(true));
  }
  set_values(params);
  return params;
}

template <class Optimizer>
std::vector<torch::Tensor> after_three_steps(std::vector<torch::Tensor> params, double lr) {
  Optimizer optimizer(params, {lr});
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients(params, step);
    if (step == 1) params[1].mutable_grad() = torch::Tensor();  // left out once
    optimizer.step();
  }
  return params;
}

template <class Optimizer>
void expect_bits_however_cut(double lr) {
  const auto expected = after_three_steps<Optimizer>(params_cut({}, nullptr), lr);
  const auto check = [&](const DeviceMesh& mesh, const std::vector<Cut>& cuts) {
    const auto params = after_three_steps<Optimizer>(params_cut(cuts, &mesh), lr);
    for (size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(torch::equal(full_value(params[i].detach()), expected[i].detach()))
          << "parameter " << i << " of " << to_string(mesh);
  };
  for (const int64_t world : {1, 2, 3, 4})
    on_ranks_of(world, [&](const DeviceMesh& mesh) {
      check(mesh, {{Shard{0}}});
      check(mesh, {{Shard{1}}, {Replicate{}}, {Owned{world - 1}}});
    });
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    check(mesh, {{Shard{0}, Shard{1}}, {Shard{0}, Shard{0}}, {Replicate{}, Shard{0}}});
  });
}

TEST(OwnedStep, OfShampooHasTheBitsOfThePlainStep) {
  expect_bits_however_cut<examples::Shampoo>(1e-2);
}

TEST(OwnedStep, OfAdamInEightBitsHasTheBitsOfThePlainStep) {
  expect_bits_however_cut<examples::Adam8bit>(1e-2);
}

// Eight bits are near enough to Adam: after three steps of 0.01 less than a tenth of a
// step apart, but where a moment is small beside its block's largest.
TEST(OwnedStep, OfAdamInEightBitsIsNearAdam) {
  const auto eight = after_three_steps<examples::Adam8bit>(params_cut({}, nullptr), 1e-2);
  const auto full = after_three_steps<torch::optim::Adam>(params_cut({}, nullptr), 1e-2);
  for (size_t i = 0; i < full.size(); ++i) {
    const auto apart = (eight[i] - full[i]).detach().abs();
    EXPECT_LT(apart.median().item<double>(), 1e-3);
    EXPECT_LT(apart.max().item<double>(), 3e-2);
  }
}

TEST(OwnedStep, TrainsAModelOfFullyShard) {
  const auto train = [](torch::nn::Sequential& model) {
    std::vector<torch::Tensor> matrices, others;
    for (const auto& parameter : model->parameters())
      (parameter.dim() == 2 ? matrices : others).push_back(parameter);
    examples::Shampoo shampoo(matrices, {1e-1});
    examples::Adam8bit adam(others, {1e-2});
    for (int64_t step = 0; step < 3; ++step) {
      model->forward(values_of({4, 6}, static_cast<double>(step))).square().mean().backward();
      shampoo.step();
      adam.step();
      shampoo.zero_grad();
      adam.zero_grad();
    }
  };
  const auto new_model = [] {
    torch::nn::Sequential model(torch::nn::Linear(6, 10), torch::nn::Linear(10, 5));
    set_values(model->parameters());
    return model;
  };
  auto plain = new_model();
  train(plain);
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    auto model = new_model();
    fully_shard(model, mesh);
    train(model);
    const auto params = model->parameters(), expected = plain->parameters();
    for (size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(torch::equal(full_value(params[i].detach()), expected[i].detach()));
  });
}

// Each cut one is computed with by one rank, which has its state; what is whole on every
// rank by each.
TEST(OwnedStep, GivesEachParameterOneOwnerWhoHasItsState) {
  std::mutex mutex;
  std::vector<int> owners(kMatrixShapes.size(), 0), computed(kMatrixShapes.size(), 0);
  run_ranks(4, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const auto params = params_cut(
        {{Shard{0}, Shard{1}}, {Replicate{}, Replicate{}}, {Replicate{}, Shard{0}}}, &mesh);
    const OwnedStep owned(params, {.optimizer = "Test"});
    const auto count = [&](std::vector<int>& counts, size_t i) {
      const std::lock_guard lock(mutex);
      ++counts[i];
    };
    for (size_t i = 0; i < params.size(); ++i) {
      const auto state = owned.zeros(i, {3, 2}, torch::kDouble);
      EXPECT_EQ(state.sizes(), (std::vector<int64_t>{3, 2}));
      EXPECT_EQ(OwnedStep::local(state).numel(), owned.computes(i) ? 6 : 0);
      if (owned.computes(i)) count(owners, i);
    }
    owned.run({4, 1, 0},
              {.input = [&](size_t i) { return params[i]; },
               .compute =
                   [&](size_t i, const at::Tensor& whole) {
                     EXPECT_TRUE(owned.computes(i));
                     EXPECT_TRUE(whole.sizes() == params[i].sizes());
                     EXPECT_FALSE(is_dtensor(whole));
                     count(computed, i);
                     return whole.mul(2);
                   },
               .apply =
                   [&](size_t i, const at::Tensor& result) {
                     EXPECT_TRUE(torch::equal(full_value(result), full_value(params[i]) * 2));
                   }});
  });
  EXPECT_EQ(owners, (std::vector<int>{1, 4, 1, 1, 4})) << "the last one is cut as the second";
  EXPECT_EQ(computed, (std::vector<int>{1, 4, 0, 0, 4}));
}

// The largest is alone on a rank where that is even.
TEST(OwnedStep, DealsOutByTheCostThatItIsGiven) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto params = params_cut({{Shard{0}}}, &mesh);
    const OwnedStep by_rows(params, {.optimizer = "Test", .cost = [](at::IntArrayRef shape) {
                                       return static_cast<double>(shape[0]);
                                     }});
    std::vector<bool> mine;
    for (size_t i = 0; i < params.size(); ++i) mine.push_back(by_rows.computes(i));
    // Rows 20 to the first rank, then 12, 8 to the second, 5 to the first or second, 1.
    EXPECT_EQ(mine, rank == 0 ? (std::vector<bool>{false, true, false, false, true})
                              : (std::vector<bool>{true, false, true, true, false}));
  });
}

TEST(OwnedStep, SendsInTheDtypeThatIsAskedFor) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto params = params_cut({{Shard{0}}}, &mesh);
    const OwnedStep owned(params, {.optimizer = "Test", .sent_as = at::kBFloat16});
    owned.run({0}, {.input = [&](size_t i) { return params[i]; },
                    .compute =
                        [](size_t, const at::Tensor& whole) {
                          EXPECT_EQ(whole.scalar_type(), at::kBFloat16);
                          return whole.to(at::kDouble);
                        },
                    .apply =
                        [](size_t, const at::Tensor& result) {
                          EXPECT_EQ(result.scalar_type(), at::kBFloat16);
                        }});
  });
}

TEST(OwnedStep, RefusesWhatItCannotStep) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    auto params = params_cut({{Shard{0}}}, &mesh);
    const OwnedStep owned(params, {.optimizer = "Mine"});
    const auto as_it_is = [](size_t, const at::Tensor& whole) { return whole; };
    const auto nothing = [](size_t, const at::Tensor&) {};
    const auto own = [&](size_t i) { return params[i]; };
    expect_error<c10::ValueError>(
        [&] {
          owned.run({0, 0}, {own, as_it_is, nothing});
        },
        HasSubstr("Mine: position 0 is given twice"));
    expect_error<c10::ValueError>(
        [&] {
          owned.run({5}, {own, as_it_is, nothing});
        },
        HasSubstr("expected each once and below 5"));
    expect_error<c10::ValueError>(
        [&] {
          owned.run({0}, {[&](size_t) { return params[1]; }, as_it_is, nothing});
        },
        HasSubstr("the input of parameter 0 has shape [5, 7], expected the parameter's, [8, 8]"));
    expect_error<c10::ValueError>(
        [&] {
          owned.run({0}, {[&](size_t) { return at::zeros({8, 8}); }, as_it_is, nothing});
        },
        HasSubstr("does not lie on the parameter's mesh"));
    expect_error<c10::ValueError>([] { OwnedStep({at::Tensor()}, {.optimizer = "Mine"}); },
                                  HasSubstr("Mine: parameter 0 is undefined"));
    const at::Tensor term = from_local(at::zeros({2}), mesh, {Partial{}});
    expect_error<c10::ValueError>([&] { OwnedStep({term}, {.optimizer = "Mine"}); },
                                  HasSubstr("Mine: parameter 0 is Partial"));
  });
}

TEST(OwnedStep, OfOtherParametersOnAnotherRankIsAnError) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto params = params_cut({{Shard{0}}}, &mesh);
    const OwnedStep owned(params, {.optimizer = "Mine"});
    expect_error<c10::Error>(
        [&] {
          owned.run({static_cast<size_t>(rank)},
                    {.input = [&](size_t i) { return params[i]; },
                     .compute = [](size_t, const at::Tensor& whole) { return whole; },
                     .apply = [](size_t, const at::Tensor&) {}});
        },
        HasSubstr("step of Mine, bucket 0"));
  });
}

}  // namespace
}  // namespace fsdp
