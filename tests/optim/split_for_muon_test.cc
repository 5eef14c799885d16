// Which parameters split_for_muon() gives to whom.
#include "optim/split_for_muon.h"

#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::on_ranks_of;

// An embedding to which the head is tied, a hidden layer, experts, a norm.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(9, 4));
    hidden = register_module("hidden", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    experts = register_parameter("experts", torch::randn({2, 3, 4}));
    output = register_module("output", torch::nn::Linear(4, 3));
    head = register_parameter("head", embedding->weight);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear hidden{nullptr}, output{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor experts, head;
};
TORCH_MODULE(LanguageModel);

std::vector<std::string> names_for_muon(const MuonSplit& split, bool is_for_muon) {
  std::vector<std::string> names;
  for (const auto& parameter : split.parameters)
    if (parameter.is_for_muon == is_for_muon) names.push_back(parameter.name);
  return names;
}

TEST(SplitForMuon, GivesItTheMatricesOfHiddenLayers) {
  LanguageModel model;
  const auto split = split_for_muon(model);
  EXPECT_THAT(names_for_muon(split, true), ElementsAre("hidden.weight", "output.weight"));
  EXPECT_THAT(names_for_muon(split, false), ElementsAre("experts", "head", "hidden.bias",
                                                        "norm.weight", "norm.bias", "output.bias"))
      << "the tied head once, as the embedding that it is";
  EXPECT_EQ(split.matrices().size(), 2U);
  EXPECT_TRUE(split.matrices()[1].is_same(model->output->weight));
  EXPECT_TRUE(split.others()[1].is_same(model->embedding->weight));
}

TEST(SplitForMuon, LeavesToTheOtherWhatIsNamed) {
  LanguageModel model;
  const auto split = split_for_muon(model, {.others = {"out*.weight", "norm.*"}});
  EXPECT_THAT(names_for_muon(split, true), ElementsAre("hidden.weight"));
  std::ostringstream text;
  text << split;
  EXPECT_THAT(text.str(), HasSubstr("hidden.weight  [6, 4]  Muon: 2-D\n"));
  EXPECT_THAT(text.str(), HasSubstr("experts  [2, 3, 4]  other: 3-D\n"));
  EXPECT_THAT(text.str(), HasSubstr("head  [9, 4]  other: of an Embedding\n"));
  EXPECT_THAT(text.str(), HasSubstr("output.weight  [3, 4]  other: named by 'out*.weight'\n"));
}

// A tied parameter is found by each of its names.
TEST(SplitForMuon, KnowsATiedMatrixByItsLaterName) {
  LanguageModel model;
  model->output->register_parameter("second_name", model->hidden->weight);
  const auto split = split_for_muon(model, {.others = {"output.second_name"}});
  EXPECT_THAT(names_for_muon(split, true), ElementsAre("output.weight"));
}

TEST(SplitForMuon, RefusesAPatternThatMeansNothing) {
  LanguageModel model;
  expect_error<c10::ValueError>([&] { (void)split_for_muon(model, {.others = {"lm_head.*"}}); },
                                HasSubstr("'lm_head.*' matches no name of a parameter"));
}

TEST(SplitForMuon, SeesTheGlobalShapesOfAShardedModel) {
  on_ranks_of(3, [](const DeviceMesh& mesh) {
    LanguageModel model;
    const auto plain = split_for_muon(model);
    fully_shard(model->hidden, mesh);
    fully_shard(model, mesh);
    const auto split = split_for_muon(model);
    EXPECT_EQ(names_for_muon(split, true), names_for_muon(plain, true));
    EXPECT_EQ(split.matrices()[0].sizes(), plain.matrices()[0].sizes());
  });
}

}  // namespace
}  // namespace fsdp
