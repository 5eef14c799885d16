// Optimizers whose state is of a kind of its own.
#include "checkpoint/checkpoint.h"
#include "checkpoint/optimizer_state_dict.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace torch::optim;

// It asserts state that it made when it was made.
TEST(OptimizerCheckpoint, AdagradStepsOnAfterStateThatTheFileLacks) {
  TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  Adagrad without_state(model->parameters(), AdagradOptions(0.1));
  without_state.state().clear();
  save({.model = model, .optimizer = without_state}, folder / "saved");
  Adagrad adagrad(model->parameters(), AdagradOptions(0.1));
  const auto step = [&](Optimizer& optimizer) {
    model->forward(torch::ones({1, 2})).sum().backward();
    optimizer.step();
  };
  step(adagrad);
  load({.model = model, .optimizer = adagrad}, folder / "saved");
  step(adagrad);
  const auto& state =
      static_cast<AdagradParamState&>(*adagrad.state().at(model->weight.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 1);
}

// Its state holds lists of tensors.
TEST(OptimizerCheckpoint, Lbfgs) {
  const auto x = torch::randn({8, 5}), y = torch::randn({8, 1});
  const auto steps = [&](torch::nn::Linear& model, LBFGS& optimizer, int count) {
    for (int i = 0; i < count; ++i) {
      optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = (model->forward(x) - y).pow(2).mean();
        loss.backward();
        return loss;
      });
    }
  };
  TemporaryFolder folder;
  const auto options = LBFGSOptions(0.5).max_iter(3).history_size(4);
  torch::nn::Linear straight(5, 1), resumed(5, 1);
  LBFGS optimizer(straight->parameters(), options), other(resumed->parameters(), options);
  steps(straight, optimizer, 2);
  save({.model = straight, .optimizer = optimizer}, folder / "saved");
  steps(straight, optimizer, 2);
  load({.model = resumed, .optimizer = other}, folder / "saved");
  steps(resumed, other, 2);
  EXPECT_TRUE(torch::equal(resumed->weight, straight->weight));
}

// A model of one weight whose optimizer has stepped.
template <class Optimizer, class Options>
struct Stepped {
  explicit Stepped(double value, Options options) : optimizer(model->parameters(), options) {
    torch::NoGradGuard no_grad;
    model->weight.fill_(value);
    model->weight.mutable_grad() = torch::ones({2, 2});
    optimizer.step();
  }
  State state() { return {.model = model, .optimizer = optimizer}; }
  torch::nn::Linear model{torch::nn::LinearOptions(2, 2).bias(false)};
  Optimizer optimizer;
};

// `load` of `path` into `to` throws a text that matches, and changes nothing.
template <class To, class Matcher>
void expect_refused_unchanged(To& to, const std::string& path, const Matcher& matcher) {
  const auto before = to.model->weight.detach().clone();
  const std::string text = message_of([&] { load(to.state(), path); });
  EXPECT_THAT(text, matcher);
  EXPECT_THAT(text, Not(HasSubstr("overwritten")));
  EXPECT_TRUE(torch::equal(to.model->weight, before));
  EXPECT_EQ(to.optimizer.state().size(), 1u);
}

TEST(OptimizerCheckpoint, AnotherClassOfOptimizerIsRefusedByNameAndNothingChanges) {
  TemporaryFolder folder;
  Stepped<SGD, SGDOptions> sgd(1, SGDOptions(0.1).momentum(0.9));
  Stepped<AdamW, AdamWOptions> adamw(2, AdamWOptions(0.1));
  Stepped<Adam, AdamOptions> adam(3, AdamOptions(0.2));
  save(sgd.state(), folder / "sgd");
  save(adamw.state(), folder / "adamw");
  const auto saved = [](const std::string& name) {
    return HasSubstr("the optimizer that was saved is torch::optim::" + name + ", and this one is");
  };
  expect_refused_unchanged(adamw, folder / "sgd", saved("SGD"));
  expect_refused_unchanged(sgd, folder / "adamw", saved("AdamW"));
  expect_refused_unchanged(adam, folder / "adamw", saved("AdamW"));
  load(adam.state(), folder / "adamw", {.strict = false});  // of the same fields
  EXPECT_TRUE(torch::equal(adam.model->weight, adamw.model->weight));
  EXPECT_THROW(load(sgd.state(), folder / "adamw", {.strict = false}), c10::ValueError);
}

TEST(OptimizerCheckpoint, AStateDictOfAnotherClassOfOptimizerIsRefusedAndNothingChanges) {
  Stepped<SGD, SGDOptions> sgd(1, SGDOptions(0.1).momentum(0.9));
  Stepped<AdamW, AdamWOptions> adamw(2, AdamWOptions(0.1));
  auto dict = get_optimizer_state_dict(*sgd.model, sgd.optimizer);
  const auto set = [&] { set_optimizer_state_dict(*adamw.model, adamw.optimizer, dict); };
  EXPECT_THAT(message_of<c10::ValueError>(set),
              AllOf(HasSubstr("dampening, lr, momentum"), HasSubstr("no torch::optim::AdamW")));
  dict.param_groups[0].options = {{"lr", 0.5}};
  EXPECT_THAT(message_of<c10::ValueError>(set),
              HasSubstr("the state is not such as torch::optim::AdamW has"));
  EXPECT_EQ(adamw.optimizer.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(static_cast<AdamWParamState&>(*adamw.optimizer.state().begin()->second).step(), 1);
}

TEST(OptimizerCheckpoint, DamageIsFoundInStateBeforeAnythingChangesAndToldOnceItHas) {
  TemporaryFolder folder;
  Stepped<AdamW, AdamWOptions> from(1, AdamWOptions(0.1)), to(2, AdamWOptions(0.1));
  const auto flip_last_byte = [&](const std::string& path) {
    const auto size = static_cast<std::streamoff>(std::filesystem::file_size(folder / path));
    std::fstream file(folder / path, std::ios::binary | std::ios::in | std::ios::out);
    const auto byte = static_cast<char>(file.seekg(size - 1).get());
    file.seekp(size - 1).put(static_cast<char>(byte ^ 1));
  };
  save(from.state(), folder / "saved");
  flip_last_byte("saved/optimizer/model.safetensors");
  expect_refused_unchanged(to, folder / "saved", HasSubstr("damaged"));
  // The first MiB of a file is checked with its header, the others as they are read.
  save({.tensors = {{"w", torch::zeros({400'000})}}}, folder / "large");
  flip_last_byte("large/tensors/model.safetensors");
  auto w = torch::ones({400'000});
  EXPECT_THAT(message_of([&] {
                load({.tensors = {{"w", w}}}, folder / "large");
              }),
              HasSubstr("the model and the optimizers are now partly overwritten"));
}

TEST(OptimizerCheckpoint, AnOptimizerOverOtherTensorsIsRefused) {
  SmallModel model;
  SGD optimizer(std::vector<torch::Tensor>{torch::zeros({2}, torch::requires_grad())},
                SGDOptions(0.1));
  TemporaryFolder folder;
  try {
    save({.model = model, .optimizer = optimizer}, folder / "saved");
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("parameter 0 of group 0, of shape [2]"));
  }
}

}  // namespace
}  // namespace fsdp::testing
