#include "programs/trainer/data/batches.h"

#include "programs/trainer/model/transformer.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::message_of;
using ::testing::HasSubstr;

// 0, 1, 2, ...
class Counting : public Tokens {
 public:
  explicit Counting(int64_t size, std::vector<int64_t> begins = {})
      : size_(size), begins_(std::move(begins)) {}
  int64_t size() const override { return size_; }
  at::Tensor read(int64_t first, int64_t count, int64_t /*vocab*/) const override {
    return torch::arange(first, first + count);
  }
  std::vector<int64_t> document_begins(int64_t first, int64_t count) const override {
    return places_in(begins_, first, count);
  }

 private:
  int64_t size_;
  std::vector<int64_t> begins_;
};

constexpr int64_t kTokens = 4;

Batches batches(int64_t windows, uint64_t seed = 1) {
  return {std::make_unique<Counting>(windows * kTokens + 1), {.seed = seed, .tokens = kTokens}};
}

// The windows of the rows.
std::vector<int64_t> windows_of(const Batch& batch) {
  std::vector<int64_t> windows;
  for (int64_t row = 0; row < batch.inputs.size(0); ++row)
    windows.push_back(batch.inputs[row][0].item<int64_t>() / kTokens);
  return windows;
}

TEST(Batches, TargetsAreInputsOneTokenLater) {
  const auto batch = batches(20).training(1, {.first = 0, .count = 3, .global = 3});
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{3, kTokens}));
  EXPECT_TRUE(torch::equal(batch.targets, batch.inputs + 1));
}

TEST(Batches, AnEpochHasEachWindowOnceThatIsNotHeldOut) {
  const auto data = batches(63);
  EXPECT_EQ(data.training_tokens(), 60 * kTokens);
  EXPECT_EQ(data.held_out_tokens(), 3 * kTokens);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t step = 1; step <= 30; ++step) {  // 6 rows each: an epoch is 10 steps
    if (step % 10 == 1) epochs.emplace_back();
    for (const auto window : windows_of(data.training(step, {.first = 0, .count = 6, .global = 6})))
      epochs.back().push_back(window);
  }
  for (const auto& epoch : epochs) {
    const std::set<int64_t> different(epoch.begin(), epoch.end());
    EXPECT_EQ(different.size(), 60u);
    for (const int64_t held_out : {19, 39, 59}) EXPECT_EQ(different.count(held_out), 0u);
    EXPECT_LE(*different.rbegin(), 62);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(Batches, HeldOutWindowsComeInTurn) {
  const auto data = batches(63);
  EXPECT_EQ(windows_of(data.held_out(0, {.first = 0, .count = 2, .global = 2})),
            (std::vector<int64_t>{19, 39}));
  EXPECT_EQ(windows_of(data.held_out(1, {.first = 0, .count = 2, .global = 2})),
            (std::vector<int64_t>{59, 19}));
}

// However the rows are dealt out, and at whatever step somebody looks first.
TEST(Batches, GlobalBatchesDoNotDependOnTheNumberOfRanks) {
  const auto data = batches(100);
  for (int64_t step : {7, 1, 40}) {
    const auto whole = windows_of(data.training(step, {.first = 0, .count = 8, .global = 8}));
    for (const int64_t ranks : {2, 4, 8}) {
      std::vector<int64_t> together;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto part = batches(100).training(
            step, {.first = rank * 8 / ranks, .count = 8 / ranks, .global = 8});
        for (const auto window : windows_of(part)) together.push_back(window);
      }
      EXPECT_EQ(together, whole);
    }
  }
}

TEST(Batches, SeedsDrawOtherOrders) {
  const BatchRows rows{.first = 0, .count = 10, .global = 10};
  EXPECT_EQ(windows_of(batches(100, 1).training(1, rows)),
            windows_of(batches(100, 1).training(1, rows)));
  EXPECT_NE(windows_of(batches(100, 1).training(1, rows)),
            windows_of(batches(100, 2).training(1, rows)));
}

// At every place with probability `density`.
std::vector<int64_t> random_begins(int64_t size, double density) {
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < size; ++i)
    if (torch::rand({}).item<double>() < density) begins.push_back(i);
  return begins;
}

Batches separate_batches(const std::vector<int64_t>& begins) {
  return {std::make_unique<Counting>(60 * kTokens + 1, begins),
          {.tokens = kTokens, .packing = Packing::kSeparate}};
}

// Also at a window's first token, at its last one, and at the one after, which is its
// last target.
TEST(Batches, DocumentsBeginAndTakeTargetsAwayWhereTheyDo) {
  torch::manual_seed(2);
  for (const double density : {0.0, 0.1, 0.5, 1.0}) {
    const auto begins = random_begins(60 * kTokens + 1, density);
    const std::set<int64_t> is_begin(begins.begin(), begins.end());
    const auto batch =
        separate_batches(begins).training(1, {.first = 0, .count = 57, .global = 57});
    int64_t targets = 0;
    for (int64_t row = 0; row < 57; ++row) {
      for (int64_t i = 0; i < kTokens; ++i) {
        const auto place = batch.inputs[row][i].item<int64_t>();
        EXPECT_EQ(batch.begins[row][i].item<bool>(), is_begin.count(place) == 1);
        const bool has_target = is_begin.count(place + 1) == 0;
        EXPECT_EQ(batch.targets[row][i].item<int64_t>(), has_target ? place + 1 : kNoTarget);
        targets += has_target ? 1 : 0;
      }
    }
    EXPECT_EQ(batch.target_count, targets);
  }
}

// One row's targets lie in the memory of its inputs.
TEST(Batches, InputsKeepTokensThatAreNoTargets) {
  const auto data = separate_batches(random_begins(60 * kTokens + 1, 1));
  const auto batch = data.training(1, {.first = 0, .count = 1, .global = 1});
  const auto first = batch.inputs[0][0].item<int64_t>();
  EXPECT_TRUE(torch::equal(batch.inputs[0], torch::arange(first, first + kTokens)));
  EXPECT_TRUE((batch.targets == kNoTarget).all().item<bool>());
}

TEST(Batches, DocumentsThatAreJoinedLeaveNoTrace) {
  const Batches joined(std::make_unique<Counting>(60 * kTokens + 1, std::vector<int64_t>{5, 9}),
                       {.tokens = kTokens});
  const auto batch = joined.training(1, {.first = 0, .count = 57, .global = 57});
  EXPECT_FALSE(batch.begins.defined());
  EXPECT_TRUE(torch::equal(batch.targets, batch.inputs + 1));
}

// Counts what it is asked to read.
class Watched final : public Counting {
 public:
  Watched(std::vector<int64_t> begins, int64_t* tokens_looked_at)
      : Counting(60 * kTokens + 1, std::move(begins)), tokens_looked_at_(tokens_looked_at) {}
  std::vector<int64_t> document_begins(int64_t first, int64_t count) const override {
    *tokens_looked_at_ += count;
    return Counting::document_begins(first, count);
  }

 private:
  int64_t* tokens_looked_at_;
};

TEST(Batches, ARankLooksAtItsOwnRowsOnly) {
  int64_t tokens = 0;
  const Batches data(std::make_unique<Watched>(std::vector<int64_t>{7, 30}, &tokens),
                     {.tokens = kTokens, .packing = Packing::kSeparate});
  data.training(1, {.first = 6, .count = 2, .global = 50});
  EXPECT_EQ(tokens, 2 * (kTokens + 1));
}

TEST(Batches, ShortTextsAreRefused) {
  EXPECT_THAT(message_of([] { batches(19); }),
              HasSubstr("77 tokens, which are 19 sequences of 4; at least 20 are needed"));
}

TEST(Shuffled, IsAnOrderOfAllPlaces) {
  for (const int64_t count : {1, 2, 3, 5, 16, 17, 1000}) {
    for (uint64_t key = 0; key < 20; ++key) {
      std::vector<int64_t> places;
      for (int64_t index = 0; index < count; ++index) places.push_back(shuffled(index, count, key));
      std::sort(places.begin(), places.end());
      std::vector<int64_t> all(static_cast<size_t>(count));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(places, all);
    }
  }
}

}  // namespace
}  // namespace programs
