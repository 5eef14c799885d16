// Tokens that go to the ranks of their experts, beside one device that has all of them:
// values and gradients, whatever goes where; and what is refused.
#include "experts/route_to_experts.h"

#include "dtensor/layout/shard_layout.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace fsdp::testing {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kWidth = 6, kChoices = 2;

// Values that differ, the same on all ranks.
Tensor waves(const std::vector<int64_t>& shape, double step) {
  return at::arange(c10::multiply_integers(shape), at::kDouble).mul(step).sin().view(shape);
}

struct Batch {
  Tensor tokens, experts, weights;
};

// Of `rank`, who has as many tokens as the row of `counts` says.
Batch batch_of(int64_t rank, int64_t tokens, int64_t experts, bool is_lopsided) {
  const double step = 0.7 + 0.1 * static_cast<double>(rank);
  const Tensor first = at::arange(tokens).add(rank).remainder(is_lopsided ? 1 : experts);
  const Tensor second = first.mul(3).add(1).remainder(experts);
  return {.tokens = waves({tokens, kWidth}, step),
          .experts = at::stack({first, second}, 1),
          .weights = waves({tokens, kChoices}, step).abs()};
}

// Each expert is a matrix and a curve.
Tensor expert(const Tensor& rows, const Tensor& matrix) { return rows.mm(matrix).tanh(); }

Tensor on_one_device(const Batch& batch, const Tensor& matrices) {
  Tensor result = at::zeros({batch.tokens.size(0), 4}, at::kDouble);
  for (int64_t choice = 0; choice < kChoices; ++choice)
    for (int64_t token = 0; token < batch.tokens.size(0); ++token) {
      const auto which = batch.experts[token][choice].item<int64_t>();
      const Tensor made = expert(batch.tokens[token].unsqueeze(0), matrices[which]);
      result = result.index_add(0, at::tensor({token}), made * batch.weights[token][choice]);
    }
  return result;
}

Tensor of_parts(const Tensor& rows, const Tensor& counts, const Tensor& matrices) {
  std::vector<Tensor> made;
  int64_t begin = 0;
  for (int64_t e = 0; e < counts.numel(); ++e) {
    const auto count = counts[e].item<int64_t>();
    made.push_back(expert(rows.narrow(0, begin, count), matrices[e]));
    begin += count;
  }
  return made.empty() ? rows.new_zeros({0, 4}) : at::cat(made);
}

class RoutedTokens : public Worlds {
 protected:
  // Rank 0 of several has none.
  int64_t tokens_of(int64_t rank) const { return world() == 1 ? 4 : 5 * rank; }
};

// Of what nothing was computed with there is none.
Tensor gradient_of(const Tensor& tensor) {
  return tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor);
}

TEST_P(RoutedTokens, HaveTheValuesAndGradientsOfOneDevice) {
  for (const int64_t experts : {1, 3, 8})
    for (const bool is_lopsided : {false, true})
      on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
        const Tensor all = waves({experts, kWidth, 4}, 0.3);
        const auto own = internal::chunk_of(experts, world(), rank);
        const Tensor mine = all.narrow(0, own.offset, own.length).clone().requires_grad_();
        const Tensor whole = all.clone().requires_grad_();
        Tensor loss_of_all = at::zeros({}, at::kDouble), expected;
        Batch plain;
        for (int64_t other = 0; other < world(); ++other) {
          Batch batch = batch_of(other, tokens_of(other), experts, is_lopsided);
          batch.tokens.requires_grad_();
          batch.weights.requires_grad_();
          const Tensor result = on_one_device(batch, whole);
          loss_of_all = loss_of_all + result.pow(2).sum();
          if (other != rank) continue;
          expected = result;
          plain = batch;
        }
        loss_of_all.backward();
        Batch batch = batch_of(rank, tokens_of(rank), experts, is_lopsided);
        batch.tokens.requires_grad_();
        batch.weights.requires_grad_();
        const Tensor result = route_to_experts(
            batch.tokens, {.experts = batch.experts, .weights = batch.weights, .count = experts},
            mesh, [&](const Tensor& rows, const Tensor& counts) {
              EXPECT_EQ(counts.numel(), own.length);
              return of_parts(rows, counts, mine);
            });
        EXPECT_TRUE(result.allclose(expected, 1e-12, 1e-12));
        result.pow(2).sum().backward();
        EXPECT_TRUE(batch.tokens.grad().allclose(gradient_of(plain.tokens), 1e-12, 1e-12));
        EXPECT_TRUE(batch.weights.grad().allclose(gradient_of(plain.weights), 1e-12, 1e-12));
        if (own.length > 0) {
          EXPECT_TRUE(
              mine.grad().allclose(whole.grad().narrow(0, own.offset, own.length), 1e-12, 1e-12));
        }
      });
}

TEST_P(RoutedTokens, OutsideOfTheExpertsAreEveryRanksError) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Batch batch = batch_of(rank, 3, 4, false);
    if (rank == world() - 1) batch.experts[1][0] = 4;
    expect_error<c10::ValueError>(
        [&] {
          static_cast<void>(route_to_experts(
              batch.tokens, {.experts = batch.experts, .weights = batch.weights, .count = 4}, mesh,
              [](const Tensor& rows, const Tensor&) { return rows; }));
        },
        AllOf(HasSubstr("expert 4"), HasSubstr("rank " + std::to_string(world() - 1)),
              HasSubstr("0 to 3")));
  });
}

INSTANTIATE_WORLDS(RoutedTokens, 1, 2, 3, 4);

TEST(AllToAll, GoesBackInTheBackward) {
  on_ranks_of(3, [](int64_t rank, const DeviceMesh& mesh) {
    // Rank r sends r + s rows to rank s.
    const auto rows = waves({3 * rank + 3, 2}, 0.4).requires_grad_();
    const std::vector<int64_t> sizes{rank, rank + 1, rank + 2};
    const Tensor come = all_to_all(rows, sizes, sizes, mesh);
    (come * static_cast<double>(rank + 1)).sum().backward();
    std::vector<Tensor> expected;
    for (int64_t to = 0; to < 3; ++to)
      expected.push_back(at::full({rank + to, 2}, static_cast<double>(to + 1), at::kDouble));
    EXPECT_TRUE(rows.grad().equal(at::cat(expected)));
  });
}

TEST(AllToAll, OfSizesThatDoNotFitIsRefused) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    expect_error<c10::ValueError>(
        [&] {
          static_cast<void>(all_to_all(at::zeros({3, 2}), {1, 1}, {1, 1}, mesh));
        },
        AllOf(HasSubstr("'to' is [1, 1]"), HasSubstr("add up to the rows")));
  });
}

}  // namespace
}  // namespace fsdp::testing
