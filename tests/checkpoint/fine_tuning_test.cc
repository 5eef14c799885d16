// Models that go on from a file of one that is not quite the same: LoadOptions::leave and
// init_new_rows.
#include "checkpoint/checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct LanguageModel : torch::nn::Module {
  LanguageModel(int64_t vocab, int64_t classes)
      : embedding(register_module("embedding", torch::nn::Embedding(vocab, 6))),
        head(register_module("head", torch::nn::Linear(6, classes))) {}
  torch::nn::Embedding embedding;
  torch::nn::Linear head;
};

// The weight of the embedding that is saved: each element another one.
at::Tensor saved_table() { return torch::arange(10 * 6, torch::kFloat).view({10, 6}); }

std::string save_model(const TemporaryFolder& folder, c10::ScalarType dtype = torch::kFloat) {
  const auto model = std::make_shared<LanguageModel>(10, 3);
  {
    const torch::NoGradGuard no_grad;
    model->embedding->weight.copy_(saved_table());
  }
  model->to(dtype);
  save({.model = model}, folder / "saved", {.layout = Layout::kFull, .overwrite = true});
  return folder / "saved";
}

// What rows that are new become.
void number_rows(const std::string& name, int64_t first, at::Tensor rows) {
  EXPECT_EQ(name, "embedding.weight");
  for (int64_t row = 0; row < rows.size(0); ++row)
    rows[row].fill_(static_cast<double>(first + row));
}

at::Tensor grown_table(int64_t vocab) {
  const auto numbers = torch::arange(10, vocab, torch::kFloat).unsqueeze(1).expand({vocab - 10, 6});
  return torch::cat({saved_table(), numbers});
}

struct Cut {
  std::string name;
  std::optional<Placement> placement;
};

class EnlargedVocabularies : public ::testing::TestWithParam<Cut> {};

TEST_P(EnlargedVocabularies, HaveTheOldRowsAndNewOnesOfEachRank) {
  const TemporaryFolder folder;
  const auto path = save_model(folder);
  const FullyShardOptions options{
      .shard_placement_fn = [](const std::string& name, const at::Tensor&) {
        return name == "embedding.weight" ? GetParam().placement : std::nullopt;
      }};
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (const int64_t vocab : {11, 17, 40}) {
      run_ranks(ranks, [&](int64_t) {
        const auto model = std::make_shared<LanguageModel>(vocab, 3);
        fully_shard(*model, init_device_mesh(torch::kCPU, {ranks}), options);
        const auto loaded = load({.model = model}, path, {.init_new_rows = number_rows});
        EXPECT_THAT(loaded.missing, IsEmpty());
        EXPECT_TRUE(torch::equal(full_value(model->embedding->parameters()[0]), grown_table(vocab)))
            << ranks << " ranks, " << vocab;
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, EnlargedVocabularies,
                         ::testing::Values(Cut{"rows", std::nullopt}, Cut{"columns", Shard{1}},
                                           Cut{"owned", Owned{}}),
                         [](const auto& info) { return info.param.name; });

TEST(FineTuning, OldRowsAreConvertedAsEver) {
  const TemporaryFolder folder;
  const auto path = save_model(folder, torch::kBFloat16);
  const auto model = std::make_shared<LanguageModel>(12, 3);
  load({.model = model}, path, {.init_new_rows = number_rows});
  EXPECT_TRUE(torch::equal(model->embedding->weight, grown_table(12)));
}

TEST(FineTuning, OtherSizesAreRefusedAsEver) {
  const TemporaryFolder folder;
  const auto path = save_model(folder);
  const auto refusal = [&](int64_t vocab, const LoadOptions& options) {
    const auto model = std::make_shared<LanguageModel>(vocab, 3);
    return message_of([&] { load({.model = model}, path, options); });
  };
  EXPECT_THAT(refusal(12, {}), HasSubstr("[12, 6] here and [10, 6] in the file"));
  EXPECT_THAT(refusal(8, {.init_new_rows = number_rows}), HasSubstr("[8, 6] here and [10, 6]"));
}

TEST(FineTuning, WhatIsLeftStaysWhateverTheFileHas) {
  const TemporaryFolder folder;
  const auto path = save_model(folder);
  run_ranks(2, [&](int64_t) {
    const auto model = std::make_shared<LanguageModel>(10, 7);  // the file's head has 3 rows
    fully_shard(*model, init_device_mesh(torch::kCPU, {2}));
    const auto before = full_value(model->head->parameters()[0]).clone();
    const auto loaded = load({.model = model}, path, {.leave = {"head"}});
    EXPECT_THAT(loaded.missing, IsEmpty());
    EXPECT_THAT(loaded.unexpected, IsEmpty());
    EXPECT_TRUE(torch::equal(full_value(model->head->parameters()[0]), before));
    EXPECT_TRUE(torch::equal(full_value(model->embedding->parameters()[0]), saved_table()));
  });
}

TEST(FineTuning, WhatIsLeftNeedNotBeInTheFile) {
  const TemporaryFolder folder;
  save({.tensors = {{"embedding.weight", saved_table()}}}, folder / "tensors");
  const auto table = torch::zeros({10, 6});
  const auto loaded = load({.tensors = {{"embedding.weight", table}, {"other", torch::ones({2})}}},
                           folder / "tensors", {.leave = {"oth*"}});
  EXPECT_THAT(loaded.missing, IsEmpty());
  EXPECT_TRUE(torch::equal(table, saved_table()));
}

TEST(FineTuning, APatternThatMeansNothingIsAnError) {
  const TemporaryFolder folder;
  const auto path = save_model(folder);
  const auto model = std::make_shared<LanguageModel>(10, 3);
  EXPECT_THAT(message_of([&] {
                load({.model = model}, path, {.leave = {"head", "tail.*"}});
              }),
              AllOf(HasSubstr("LoadOptions::leave: 'tail.*' means no name")));
}

}  // namespace
}  // namespace fsdp::testing
