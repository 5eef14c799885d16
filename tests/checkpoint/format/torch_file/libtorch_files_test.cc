// Files of LibTorch's own torch::save: models, optimizers and lists of tensors.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_equal_values(SmallModel& read, SmallModel& expected) {
  const auto want = full_values(*expected);
  for (const auto& item : full_values(*read)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

TEST(LibTorchFiles, AModelOfTorchSaveLoadsPlainAndSharded) {
  TemporaryFolder folder;
  SmallModel saved;
  fill(*saved, 1);
  torch::save(saved, folder / "model.pt");
  for (const int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t) {
      SmallModel model, expected;
      fill(*model, 6), fill(*expected, 1);
      if (world > 1) shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
      load({.model = model}, folder / "model.pt");
      expect_equal_values(model, expected);
    });
  }
}

TEST(LibTorchFiles, AListOfTensorsLoadsByItsIndices) {
  TemporaryFolder folder;
  torch::save(std::vector<torch::Tensor>{torch::arange(3), torch::ones({2, 2})},
              folder / "list.pt");
  auto first = torch::zeros({3}, torch::kLong), second = torch::zeros({2, 2});
  load({.tensors = {{"0", first}, {"1", second}}}, folder / "list.pt");
  EXPECT_TRUE(torch::equal(first, torch::arange(3)));
  EXPECT_TRUE(torch::equal(second, torch::ones({2, 2})));
}

TEST(LibTorchFiles, ADictionaryOfPickleSaveLoadsByItsKeys) {
  TemporaryFolder folder;
  c10::Dict<std::string, torch::Tensor> dict;
  dict.insert("w", torch::arange(4).view({2, 2}).t());
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream(folder / "dict.pt", std::ios::binary).write(bytes.data(), bytes.size());
  auto w = torch::zeros({2, 2}, torch::kLong);
  load({.tensors = {{"w", w}}}, folder / "dict.pt");
  EXPECT_TRUE(torch::equal(w, torch::arange(4).view({2, 2}).t()));
}

at::Tensor complex_column() {
  return torch::complex(torch::arange(6.), torch::arange(6.) - 10).view({6, 1});
}

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

// By each of LibTorch's ways of writing tensors under names; `check` gets the paths.
void save_by_each_way(const NamedTensors& tensors,
                      const std::function<void(const std::string& path)>& check) {
  TemporaryFolder folder;
  c10::Dict<std::string, torch::Tensor> dict;
  torch::serialize::OutputArchive archive;
  for (const auto& [name, tensor] : tensors) {
    dict.insert(name, tensor);
    archive.write(name, tensor);
  }
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream(folder / "dict.pt", std::ios::binary).write(bytes.data(), bytes.size());
  archive.save_to(folder / "archive.pt");
  check(folder / "dict.pt");
  check(folder / "archive.pt");
}

// The bits stand in a dictionary that may have its type with it, and the imaginary part
// of a conjugate behind it in the same storage is written as complex.
TEST(LibTorchFiles, LazyBitsAreResolved) {
  const auto conj = complex_column().conj();
  const NamedTensors saved = {
      {"conj", conj}, {"imag", torch::imag(conj)}, {"own", torch::imag(complex_column().conj())}};
  EXPECT_TRUE(saved[1].second.is_neg());
  save_by_each_way(saved, [&](const std::string& path) {
    auto read = torch::zeros({6, 1}, torch::kComplexFloat);
    auto imag = torch::zeros({6, 1}), own = torch::zeros({6, 1});
    load({.tensors = {{"conj", read}, {"imag", imag}, {"own", own}}}, path);
    EXPECT_TRUE(torch::equal(read, conj.resolve_conj())) << path;
    EXPECT_TRUE(torch::equal(imag, saved[1].second.resolve_neg())) << path;
    EXPECT_TRUE(torch::equal(own, imag)) << path;
  });
}

// LibTorch writes one dtype for a storage, that of the first tensor in it.
TEST(LibTorchFiles, TensorsOfAnotherDtypeThanIsWrittenAreNamed) {
  const auto skipped = [](const NamedTensors& saved, const std::string& name,
                          const std::string& why) {
    save_by_each_way(saved, [&](const std::string& path) {
      auto read = torch::zeros({6, 1});
      const std::string text = message_of<c10::ValueError>([&] {
        load({.tensors = {{name, read}}}, path);
      });
      EXPECT_THAT(text, HasSubstr("'" + name + "' is a tensor " + why)) << path;
    });
  };
  const auto values = complex_column();
  skipped({{"whole", values}, {"real", torch::real(values)}}, "real",
          "that lies outside of its storage, as LibTorch writes a real view");
  skipped({{"real", torch::real(values)}, {"conj", values.conj()}}, "conj",
          "with the bit of a complex tensor and a real dtype");
}

using MakeOfGroups = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

std::unique_ptr<torch::optim::Optimizer> optimizer_of(SmallModel& model, const MakeOfGroups& make) {
  std::vector<torch::Tensor> first = model->first->parameters(), rest;
  for (auto& item : model->named_parameters()) {
    if (!item.key().starts_with("first.") && item.value().requires_grad())
      rest.push_back(item.value());
  }
  return make({torch::optim::OptimizerParamGroup(first), torch::optim::OptimizerParamGroup(rest)});
}

void train_step(SmallModel& model, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  model->eval();  // without dropout
  model->forward(torch::arange(20.).view({4, 5}) / 20).pow(2).mean().backward();
  optimizer.step();
}

// A run of LibTorch alone that goes on here, sharded: its steps are those of the run.
void expect_goes_on(const MakeOfGroups& make) {
  TemporaryFolder folder;
  SmallModel plain;
  torch::manual_seed(4);
  for (auto& p : plain->parameters()) torch::nn::init::normal_(p, 0, .1);
  auto optimizer = optimizer_of(plain, make);
  for (int i = 0; i < 3; ++i) train_step(plain, *optimizer);
  torch::save(plain, folder / "model.pt");
  torch::save(*optimizer, folder / "optimizer.pt");
  for (int i = 0; i < 2; ++i) train_step(plain, *optimizer);
  for (const int64_t world : {1, 2}) {
    run_ranks(world, [&](int64_t) {
      SmallModel model;
      shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
      auto resumed = optimizer_of(model, make);
      for (auto& group : resumed->param_groups()) group.options().set_lr(123);
      load({.model = model}, folder / "model.pt");
      load({.optimizer = *resumed}, folder / "optimizer.pt");
      for (int i = 0; i < 2; ++i) train_step(model, *resumed);
      const auto want = full_values(*plain);
      for (const auto& item : full_values(*model)) {
        EXPECT_TRUE(torch::allclose(item.value(), want[item.key()], 1e-5, 1e-7))
            << item.key() << " at world " << world;
      }
    });
  }
}

using torch::optim::OptimizerParamGroup;

TEST(LibTorchFiles, ARunWithAdamWGoesOnSharded) {
  expect_goes_on([](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::AdamW>(
        std::move(groups), torch::optim::AdamWOptions(0.03).amsgrad(true).betas({0.8, 0.9}));
  });
}

TEST(LibTorchFiles, ARunWithSgdAndMomentumGoesOnSharded) {
  expect_goes_on([](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::SGD>(std::move(groups),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  });
}

TEST(LibTorchFiles, ARunWithAdagradGoesOnSharded) {
  expect_goes_on([](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::Adagrad>(std::move(groups),
                                                   torch::optim::AdagradOptions(0.1));
  });
}

TEST(LibTorchFiles, ARunWithLbfgsGoesOn) {
  TemporaryFolder folder;
  const auto problem = torch::arange(12.).view({3, 4}) / 12;
  const auto step = [&](torch::Tensor& x, torch::optim::LBFGS& optimizer) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = (problem * x).sin().sum() + x.pow(4).sum();
      loss.backward();
      return loss;
    });
  };
  auto x = torch::full({4}, 0.3, torch::requires_grad());
  // With a longer history LibTorch itself cannot save: its scratch has undefined tensors.
  const auto options = torch::optim::LBFGSOptions(0.1).max_iter(2).history_size(1);
  torch::optim::LBFGS optimizer({x}, options);
  step(x, optimizer), step(x, optimizer);
  torch::save(optimizer, folder / "optimizer.pt");
  auto y = x.detach().clone().requires_grad_();
  torch::optim::LBFGS resumed({y}, torch::optim::LBFGSOptions(0.5));
  load({.optimizer = resumed}, folder / "optimizer.pt");
  step(x, optimizer), step(y, resumed);
  EXPECT_TRUE(torch::equal(x, y));
}

TEST(LibTorchFiles, AnOptimizerThatDoesNotFitIsRefusedByWhatDiffers) {
  TemporaryFolder folder;
  SmallModel model;
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  train_step(model, sgd);
  torch::save(sgd, folder / "sgd.pt");
  const auto message = [&](torch::optim::Optimizer& optimizer) {
    return message_of<c10::ValueError>([&] { load({.optimizer = optimizer}, folder / "sgd.pt"); });
  };
  torch::optim::AdamW adam(model->parameters());
  EXPECT_THAT(message(adam),
              HasSubstr("of an optimizer of another class: group 0 has no option 'amsgrad'"));
  torch::optim::SGD fewer({model->first->weight}, torch::optim::SGDOptions(0.1));
  EXPECT_THAT(message(fewer), HasSubstr("group 0 has more than 1 parameters"));
  torch::optim::SGD groups({OptimizerParamGroup(model->parameters()), OptimizerParamGroup({})},
                           torch::optim::SGDOptions(0.1));
  EXPECT_THAT(message(groups), HasSubstr("it has 1 groups of parameters, and this optimizer 2"));
  auto parameters = model->parameters();
  parameters[2] = torch::zeros({2, 2}, torch::requires_grad());  // for first.weight
  torch::optim::SGD others(parameters, torch::optim::SGDOptions(0.1));
  EXPECT_THAT(message(others), AllOf(HasSubstr("groups.0.2.momentum_buffer"), HasSubstr("[7, 5]"),
                                     HasSubstr("[2, 2]")));
}

}  // namespace
}  // namespace fsdp::testing
