// What would take minutes, or longer than a test may, if its time grew with the square of
// the number of names.
#include "checkpoint/checkpoint.h"
#include "checkpoint/io/misfits.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/plan/save_plan.h"
#include "tests/checkpoint/seconds_of.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace cp = internal::checkpoint;

// "layer.<first>.weight" and so on.
std::vector<std::string> numbered_names(int64_t first, int64_t count) {
  std::vector<std::string> names;
  for (int64_t i = first; i < first + count; ++i)
    names.push_back("layer." + std::to_string(i) + ".weight");
  return names;
}

struct ManyParametersImpl : torch::nn::Module {
  explicit ManyParametersImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      register_parameter("w" + std::to_string(i), torch::zeros({1}));
  }
};
TORCH_MODULE(ManyParameters);

// The dict of the whole model, and an optimizer over an adapter.
TEST(ManyNames, RekeyingDropsAllThatTheOptimizerLacks) {
  constexpr int64_t kCount = 20'000;
  ManyParameters model(kCount);
  torch::optim::SGD optimizer({model->named_parameters()["w7"]}, torch::optim::SGDOptions(0.1));
  OptimizerStateDict dict;
  auto& group = dict.param_groups.emplace_back();
  for (const auto& item : model->named_parameters()) {
    group.params.push_back(item.key());
    dict.state[item.key()]["momentum_buffer"] = item.value();
  }
  const auto ids = rekey(dict, KeyType::kId, *model, optimizer);
  ASSERT_EQ(ids.state.size(), 1u);
  EXPECT_TRUE(
      ids.state.at("0").at("momentum_buffer").toTensor().is_same(model->named_parameters()["w7"]));
  EXPECT_EQ(ids.param_groups.at(0).params, std::vector<std::string>{"0"});
}

cp::Manifest with_scalars(const std::vector<std::string>& names) {
  cp::ItemRecord record{.kind = "optimizer"};
  record.details = {{"class", "AdamW"},
                    {"scalars", names},
                    {"lists", cp::Json::object()},
                    {"groups", cp::Json::array()}};
  record.details["groups"].push_back({{"params", names}, {"options", cp::Json::object()}});
  cp::Manifest manifest{.world_size = 3};
  manifest.items.emplace("optimizer", std::move(record));
  return manifest;
}

// The second rank shares half of its names with the first, and the third one none.
TEST(ManyNames, OfStagesAreMergedEachOnce) {
  constexpr int64_t kCount = 30'000;
  const auto merged = cp::merge_plans({with_scalars(numbered_names(0, kCount)),
                                       with_scalars(numbered_names(kCount / 2, kCount)),
                                       with_scalars(numbered_names(2 * kCount, kCount))});
  const auto scalars =
      merged.items.at("optimizer").details.at("scalars").get<std::vector<std::string>>();
  auto expected = numbered_names(0, kCount + kCount / 2);
  for (const auto& name : numbered_names(2 * kCount, kCount)) expected.push_back(name);
  EXPECT_TRUE(scalars == expected) << scalars.size();
}

TEST(ManyNames, ThatRanksMissAreCollectedInTheOrderOfTheRanks) {
  constexpr int64_t kCount = 40'000;
  run_ranks(2, [](int64_t rank) {
    const cp::UnmatchedNames mine = {numbered_names(rank * kCount / 2, kCount),
                                     numbered_names(rank, kCount)};
    const auto all = cp::unmatched_by_all(mine, cp::default_world(), "load");
    EXPECT_TRUE(all.missing == numbered_names(0, kCount + kCount / 2)) << all.missing.size();
    auto expected = numbered_names(1, kCount - 1);
    std::sort(expected.begin(), expected.end());
    EXPECT_TRUE(all.unexpected == expected) << all.unexpected.size();
  });
}

TEST(ManyTensors, SavingVerifyingAndLoadingThemIsLinear) {
  const auto seconds = [](int count) {
    TemporaryFolder folder(memory_folder());
    std::map<std::string, at::Tensor> tensors;
    for (int i = 0; i < count; ++i) tensors["layer." + std::to_string(i)] = torch::ones({2});
    save({.tensors = tensors}, folder / "saved");
    return seconds_of([&] {
      verify_checkpoint(folder / "saved");
      load({.tensors = tensors}, folder / "saved");
    });
  };
  const double few = std::min(seconds(2000), seconds(2000));
  EXPECT_LT(seconds(16000), 24 * few);  // eight times the tensors; it was 64 times
}

}  // namespace
}  // namespace fsdp::testing
