#include "programs/trainer/model/documents.h"

#include "fully_shard/activation_checkpoint.h"
#include "programs/trainer/model/transformer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace programs {
namespace {

// bool [1, tokens]: bit i of `pattern` says whether a document begins at token i.
torch::Tensor begins_of(int64_t pattern, int64_t tokens) {
  auto begins = torch::zeros({1, tokens}, torch::kBool);
  for (int64_t i = 0; i < tokens; ++i) begins[0][i] = (pattern >> i & 1) != 0;
  return begins;
}

// (first, count) of each document.
using Spans = std::vector<std::pair<int64_t, int64_t>>;
Spans spans_of(int64_t pattern, int64_t tokens) {
  Spans spans = {{0, 0}};
  for (int64_t i = 0; i < tokens; ++i) {
    if (i > 0 && (pattern >> i & 1) != 0) spans.emplace_back(i, 0);
    ++spans.back().second;
  }
  return spans;
}

// All there are of 7 tokens: documents of one token, longer than the window, and with
// ends at its edges, whether or not its first token begins one.
TEST(Documents, StartAgainWithPositionsAndAttendToThemselvesAlone) {
  constexpr int64_t kTokens = 7;
  std::vector<torch::Tensor> all;
  for (int64_t pattern = 0; pattern < 1 << kTokens; ++pattern)
    all.push_back(begins_of(pattern, kTokens));
  const auto documents = documents_of(torch::cat(all));
  EXPECT_EQ(documents.mask.sizes(), (std::vector<int64_t>{1 << kTokens, 1, kTokens, kTokens}));
  EXPECT_EQ(documents.mask.scalar_type(), torch::kBool);
  for (int64_t pattern = 0; pattern < 1 << kTokens; ++pattern) {
    auto positions = torch::empty({kTokens}, torch::kLong);
    auto mask = torch::zeros({kTokens, kTokens}, torch::kBool);
    for (const auto& [first, count] : spans_of(pattern, kTokens)) {
      for (int64_t i = 0; i < count; ++i) {
        positions[first + i] = i;
        for (int64_t j = 0; j <= i; ++j) mask[first + i][first + j] = true;
      }
    }
    EXPECT_TRUE(torch::equal(documents.positions[pattern], positions)) << pattern;
    EXPECT_TRUE(torch::equal(documents.mask[pattern][0], mask)) << pattern;
  }
}

// In double, with weights so large that attention is far from a mean.
Transformer sharp_model() {
  torch::manual_seed(5);
  Transformer model(TransformerConfig{.vocab = 23,
                                      .width = 16,
                                      .blocks = 2,
                                      .heads = 4,
                                      .kv_heads = 2,
                                      .max_tokens = 6,
                                      .head_width = 6});
  model->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.mul_(parameter.dim() > 1 ? 20 : 1);
  return model;
}

std::vector<torch::Tensor> gradients_of(Transformer& model, const torch::Tensor& loss) {
  model->zero_grad();
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

// Of single losses, so that each token's gradient counts differently.
torch::Tensor weighed(const torch::Tensor& logits, const torch::Tensor& weights) {
  return (logits.log_softmax(-1) * weights).sum();
}

class PackedDocuments : public ::testing::TestWithParam<bool> {};

// Every way to divide a window of 5 tokens, all in one batch: logits and gradients are
// those of the documents one by one, also where blocks are computed again in backward.
TEST_P(PackedDocuments, AreComputedAsIfEachWereAlone) {
  constexpr int64_t kTokens = 5, kPatterns = 1 << kTokens;
  auto model = sharp_model();
  if (GetParam())
    model->around_block = [](const auto& run, const auto& x) { return fsdp::checkpoint(run, x); };
  const auto tokens = torch::randint(23, {kPatterns, kTokens}, torch::kLong);
  const auto weights = torch::randn({kPatterns, kTokens, 23}, torch::kFloat64);
  std::vector<torch::Tensor> begins;
  for (int64_t pattern = 0; pattern < kPatterns; ++pattern)
    begins.push_back(begins_of(pattern, kTokens));
  const auto packed = model->forward(tokens, documents_of(torch::cat(begins)));
  const auto gradients = gradients_of(model, weighed(packed, weights));

  std::vector<torch::Tensor> rows;
  for (int64_t pattern = 0; pattern < kPatterns; ++pattern) {
    std::vector<torch::Tensor> alone;
    for (const auto& [first, count] : spans_of(pattern, kTokens))
      alone.push_back(model->forward(tokens[pattern].narrow(0, first, count).unsqueeze(0)));
    rows.push_back(torch::cat(alone, 1));
  }
  const auto expected = torch::cat(rows);
  EXPECT_TRUE(torch::allclose(packed, expected, 0, 1e-10)) << (packed - expected).abs().max();
  const auto expected_gradients = gradients_of(model, weighed(expected, weights));
  for (size_t i = 0; i < gradients.size(); ++i)
    EXPECT_TRUE(torch::allclose(gradients[i], expected_gradients[i], 1e-9, 1e-9)) << i;
  // Documents matter to this model.
  EXPECT_GT((model->forward(tokens) - packed).abs().max().item<double>(), 0.1);
}

INSTANTIATE_TEST_SUITE_P(WithCheckpoints, PackedDocuments, ::testing::Bool());

TEST(NextTokenLoss, SumsWhatHasATargetByTheCountThatIsGiven) {
  const auto logits = torch::randn({1, 4, 5});
  const auto targets = torch::tensor({{1, int(kNoTarget), 4, int(kNoTarget)}}, torch::kLong);
  const auto kept = torch::tensor({0, 2}, torch::kLong);
  const auto mean =
      next_token_loss(logits.index_select(1, kept), targets.index_select(1, kept)).item<double>();
  EXPECT_NEAR(next_token_loss(logits, targets, 2).item<double>(), mean, 1e-6);
  EXPECT_NEAR(next_token_loss(logits, targets, 8).item<double>(), mean / 4, 1e-6);
  EXPECT_EQ(next_token_loss(logits, torch::full({1, 4}, kNoTarget), 1).item<double>(), 0);
}

}  // namespace
}  // namespace programs
