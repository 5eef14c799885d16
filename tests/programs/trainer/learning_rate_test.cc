#include "programs/trainer/setup/learning_rate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace programs {
namespace {

TEST(LearningRate, RisesToTheWholeInWarmup) {
  const LearningRateOptions options{.warmup = 4};
  for (int64_t done = 0; done < 4; ++done)
    EXPECT_DOUBLE_EQ(share_of_learning_rate(options, done), 0.2 * static_cast<double>(done + 1));
  for (const int64_t done : {4, 5, 1000}) EXPECT_EQ(share_of_learning_rate(options, done), 1);
}

TEST(LearningRate, FallsAsACosineToATenth) {
  const LearningRateOptions options{.warmup = 10, .decay = Decay::kCosine, .steps = 110};
  EXPECT_DOUBLE_EQ(share_of_learning_rate(options, 10), 1);
  EXPECT_DOUBLE_EQ(share_of_learning_rate(options, 60), 0.55);
  EXPECT_DOUBLE_EQ(share_of_learning_rate(options, 110), 0.1);
  EXPECT_DOUBLE_EQ(share_of_learning_rate(options, 500), 0.1);
  const LearningRateOptions all_warmup{.warmup = 5, .decay = Decay::kCosine, .steps = 3};
  EXPECT_DOUBLE_EQ(share_of_learning_rate(all_warmup, 2), 0.5);
}

TEST(LearningRate, IsThatOfEachGroup) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : {0.1, 0.01})
    groups.emplace_back(std::vector<torch::Tensor>{torch::ones({2})},
                        std::make_unique<torch::optim::SGDOptions>(rate));
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1));
  LearningRate rate(optimizer, {.warmup = 1});
  rate.step();
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
  EXPECT_DOUBLE_EQ(optimizer.param_groups()[1].options().get_lr(), 0.005);
  rate.step();
  EXPECT_DOUBLE_EQ(rate.now(), 0.1);
}

}  // namespace
}  // namespace programs
