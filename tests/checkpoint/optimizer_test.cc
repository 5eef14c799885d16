// Optimizers whose state is of a kind of its own.
#include "checkpoint/checkpoint.h"
#include "tests/checkpoint/small_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using namespace torch::optim;

// It asserts state that it made when it was made.
TEST(OptimizerCheckpoint, AdagradStepsOnAfterStateThatTheFileLacks) {
  TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  SGD plain(model->parameters(), SGDOptions(0.1));  // never has state
  save({.model = model, .optimizer = plain}, folder / "saved");
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
