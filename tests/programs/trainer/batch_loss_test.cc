#include "programs/trainer/batch_loss.h"

#include "device_mesh/device_mesh.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::run_ranks;

constexpr int64_t kWindowTokens = 4;

// 0, 1, 2, ...: a document begins at every third token and at every fifth.
class ManyDocuments final : public Tokens {
 public:
  int64_t size() const override { return 60 * kWindowTokens + 1; }
  at::Tensor read(int64_t first, int64_t count, int64_t) const override {
    return torch::arange(first, first + count) % 64;
  }
  std::vector<int64_t> document_begins(int64_t first, int64_t count) const override {
    std::vector<int64_t> begins;
    for (int64_t i = first; i < first + count; ++i)
      if (i % 3 == 0 || i % 5 == 0) begins.push_back(i);
    return begins;
  }
};

Batches data_of_documents() {
  return {std::make_unique<ManyDocuments>(),
          {.tokens = kWindowTokens, .packing = Packing::kSeparate}};
}

// `backwards` batches of a rank, of 8 rows of all ranks.
std::vector<Batch> own_batches(int64_t rank, int64_t ranks, int64_t backwards) {
  const int64_t rows = 8 / (ranks * backwards);
  std::vector<Batch> all;
  for (int64_t i = 0; i < backwards; ++i)
    all.push_back(data_of_documents().training(
        2, {.first = (i * ranks + rank) * rows, .count = rows, .global = 8}));
  return all;
}

// However the rows are dealt out.
TEST(BatchLoss, IsInTheMeanTheMeanOverAllTargets) {
  torch::manual_seed(1);
  Transformer model(TransformerConfig{.vocab = 64, .width = 8, .blocks = 1, .heads = 2});
  const torch::NoGradGuard no_grad;
  const auto whole = own_batches(0, 1, 1);
  ASSERT_LT(whole[0].target_count, 8 * kWindowTokens);
  const double count = mean_target_count(whole);
  EXPECT_EQ(count, static_cast<double>(whole[0].target_count));
  const double expected = batch_loss(model, whole[0], count).item<double>();
  for (const int64_t ranks : {1, 2, 4}) {
    for (const int64_t backwards : {1, 2}) {
      const double mean = count / static_cast<double>(ranks * backwards);
      run_ranks(ranks, [&](int64_t rank) {
        const auto mesh = fsdp::init_device_mesh(torch::kCPU, {ranks});
        EXPECT_DOUBLE_EQ(mean_target_count(own_batches(rank, ranks, backwards), mesh), mean);
      });
      double sum = 0;
      for (int64_t rank = 0; rank < ranks; ++rank)
        for (const auto& batch : own_batches(rank, ranks, backwards))
          sum += batch_loss(model, batch, mean).item<double>();
      EXPECT_NEAR(sum / static_cast<double>(ranks * backwards), expected, 1e-6 * expected);
    }
  }
}

TEST(BatchLoss, OfNoTargetsIsNothing) {
  Batch batch{torch::zeros({1, kWindowTokens}, torch::kLong),
              torch::full({1, kWindowTokens}, kNoTarget, torch::kLong),
              torch::ones({1, kWindowTokens}, torch::kBool)};
  Transformer model(TransformerConfig{.vocab = 64, .width = 8, .blocks = 1, .heads = 2});
  EXPECT_EQ(batch_loss(model, batch, mean_target_count({batch})).item<double>(), 0);
}

}  // namespace
}  // namespace programs
