// Tensors that PyTorch marks as conjugated or negated, and has not computed yet: whoever
// reads their bytes computes them first.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/state_dict.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/value_hash.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace fsdp::testing {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

at::Tensor complex_values() {
  return torch::complex(torch::arange(6, torch::kFloat), torch::arange(6, torch::kFloat) - 10)
      .view({6, 1});
}

// Both carry their bit.
Tensors lazy_tensors() {
  const auto conj = complex_values().conj(), neg = torch::imag(complex_values().conj());
  EXPECT_TRUE(conj.is_conj());
  EXPECT_TRUE(neg.is_neg());
  return {{"conj", conj}, {"neg", neg}};
}

void expect_in(const std::string& path) {
  const auto want = lazy_tensors();
  auto conj = torch::zeros({6, 1}, torch::kComplexFloat), neg = torch::zeros({6, 1});
  load({.tensors = {{"conj", conj}, {"neg", neg}}}, path);
  EXPECT_TRUE(torch::equal(conj, want.at("conj").resolve_conj()));
  EXPECT_TRUE(torch::equal(neg, want.at("neg").resolve_neg()));
}

TEST(LazyBits, SavedTensorsAreTheValuesAtAnyWorldAndLayout) {
  TemporaryFolder folder;
  save({.tensors = lazy_tensors()}, folder / "alone");
  expect_in(folder / "alone");
  run_ranks(2, [&](int64_t) {
    for (const Layout layout : {Layout::kSharded, Layout::kFull}) {
      save({.tensors = lazy_tensors()}, folder / "saved", {.layout = layout, .overwrite = true});
      expect_in(folder / "saved");
    }
    for (const int64_t staged : {int64_t{0}, INT64_MAX}) {
      async_save({.tensors = lazy_tensors()}, folder / "saved", {.overwrite = true}, {staged})
          .wait();
      expect_in(folder / "saved");
    }
    save({.per_rank = {{"own", lazy_tensors().at("conj")}}}, folder / "own");
    const auto own = load({}, folder / "own").per_rank.at("own").toTensor();
    EXPECT_TRUE(torch::equal(own, complex_values().conj().resolve_conj()));
  });
}

// Of which each rank holds a part that carries the bit.
TEST(LazyBits, DistributedTensorsAreSavedAndGatheredAsTheValues) {
  TemporaryFolder folder;
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    Tensors lazy;
    for (const auto& [name, value] : lazy_tensors()) {
      const auto whole = name == "conj" ? complex_values() : torch::imag(complex_values());
      const auto part = DTensor(distribute_tensor(whole.clone(), mesh, {Shard{0}})).to_local();
      lazy[name] = from_local(name == "conj" ? part.conj() : part._neg_view(), mesh, {Shard{0}});
    }
    for (const Layout layout : {Layout::kSharded, Layout::kFull}) {
      save({.tensors = lazy}, folder / "saved", {.layout = layout, .overwrite = true});
      expect_in(folder / "saved");
    }
  });
}

TEST(LazyBits, ValuesAreLoadedIntoTensorsThatCarryABit) {
  TemporaryFolder folder;
  const auto values = complex_values();
  save({.tensors = {{"conj", values}, {"neg", torch::imag(values)}}}, folder / "saved");
  auto conj = torch::zeros({6, 1}, torch::kComplexFloat).conj();
  auto neg = torch::imag(torch::zeros({6, 1}, torch::kComplexFloat).conj());
  load({.tensors = {{"conj", conj}, {"neg", neg}}}, folder / "saved");
  EXPECT_TRUE(torch::equal(conj.resolve_conj(), values));
  EXPECT_TRUE(torch::equal(neg.resolve_neg(), torch::imag(values)));
}

TEST(LazyBits, BroadcastValuesOfADictAreTheValues) {
  run_ranks(2, [](int64_t rank) {
    torch::nn::Module module("Holder");
    auto weight = module.register_buffer("w", torch::zeros({6, 1}, torch::kComplexFloat));
    StateDict dict;
    if (rank == 0) dict.insert("w", complex_values().conj());
    set_model_state_dict(module, dict, {.full_state_dict = true, .broadcast_from_rank0 = true});
    EXPECT_TRUE(torch::equal(weight, complex_values().conj().resolve_conj()));
  });
}

TEST(LazyBits, RedistributionSendsTheValues) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    const auto values = complex_values();
    const auto part = DTensor(distribute_tensor(values.clone(), mesh, {Shard{0}})).to_local();
    const DTensor lazy(from_local(part.conj(), mesh, {Shard{0}}));
    EXPECT_TRUE(torch::equal(lazy.full_tensor(), values.conj().resolve_conj()));
    const auto real = torch::arange(6, torch::kFloat).view({6, 1});
    const auto rows = DTensor(distribute_tensor(real.clone(), mesh, {Shard{0}})).to_local();
    const DTensor negated(from_local(rows._neg_view(), mesh, {Shard{0}}));
    EXPECT_TRUE(torch::equal(negated.full_tensor(), -real));
    const DTensor halves(from_local((values / 2).conj(), mesh, {Partial{}}));
    EXPECT_TRUE(torch::equal(halves.full_tensor(), values.conj().resolve_conj()));
  });
}

TEST(LazyBits, HashesAreOfTheValues) {
  using internal::hash_of_values;
  const auto values = complex_values();
  EXPECT_EQ(hash_of_values(values.conj(), 1), hash_of_values(values.conj().resolve_conj(), 1));
  EXPECT_NE(hash_of_values(values.conj(), 1), hash_of_values(values, 1));
}

// The identity, whose gradient comes negated and marked so.
struct NegatedGradient : torch::autograd::Function<NegatedGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].contiguous()._neg_view()};
  }
};

TEST(LazyBits, GradientsAreReducedAsTheValues) {
  on_ranks_of(2, [](const DeviceMesh& mesh) {
    torch::nn::Linear model(torch::nn::LinearOptions(3, 4).bias(false));
    torch::nn::init::constant_(model->weight, 0.5);
    fully_shard(model, mesh);
    const auto x = torch::arange(6, torch::kFloat).view({2, 3});
    torch::linear(x, NegatedGradient::apply(model->weight)).sum().backward();
    const auto want = -x.sum(0).expand({4, 3});
    EXPECT_TRUE(torch::equal(full_value(model->parameters()[0].grad()), want));
  });
}

TEST(LazyBits, ParametersThatCarryABitAreRefusedByName) {
  run_ranks(2, [](int64_t) {
    const auto module = std::make_shared<torch::nn::Module>("Holder");
    module->register_parameter("w", torch::ones({4})._neg_view().detach());
    expect_error<c10::ValueError>(
        [&] { fully_shard(module, init_device_mesh(torch::kCPU, {2})); },
        ::testing::AllOf(::testing::HasSubstr("'w'"), ::testing::HasSubstr("resolve_neg()")));
  });
}

}  // namespace
}  // namespace fsdp::testing
