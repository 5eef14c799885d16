// Tokens that go to the ranks of their experts, beside one device that has all of them:
// values and gradients, whatever goes where; and what is refused.
#include "experts/route_to_experts.h"

#include "dtensor/dtensor.h"
#include "dtensor/layout/shard_layout.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
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
    // Rank r sends r + 2s rows to rank s, which begin with those for rank 0.
    const auto rows_of = [](int64_t of) { return waves({3 * of + 6, 2}, of == 1 ? 0.4 : 0.7); };
    const auto size = [](int64_t from, int64_t to) { return from + 2 * to; };
    std::vector<int64_t> sent, received;
    std::vector<Tensor> expected, expected_grad;
    for (int64_t other = 0; other < 3; ++other) {
      sent.push_back(size(rank, other));
      received.push_back(size(other, rank));
      const int64_t first = rank * other + rank * (rank - 1);  // of what `other` sends here
      expected.push_back(rows_of(other).narrow(0, first, size(other, rank)));
      expected_grad.push_back(
          at::full({size(rank, other), 2}, static_cast<double>(other + 1), at::kDouble));
    }
    const auto rows = rows_of(rank).requires_grad_();
    const Tensor come = all_to_all(rows, sent, received, mesh);
    EXPECT_TRUE(come.equal(at::cat(expected)));
    (come * static_cast<double>(rank + 1)).sum().backward();
    EXPECT_TRUE(rows.grad().equal(at::cat(expected_grad)));
  });
}

TEST(AllToAll, OfSizesThatDoNotFitIsRefusedOnAllRanks) {
  struct Case {
    std::vector<int64_t> to, from;  // of rank 1; others are right
    std::string error;
  };
  const std::vector<Case> cases = {
      {{1, 1}, {2, 1}, "'to' is [1, 1]"},
      {{4, -1}, {2, 1}, "none below 0"},
      {{3}, {2, 1}, "as many numbers as ranks"},
      {{2, 1}, {1, 1}, "rank 0 sends 2 rows to rank 1, which expects 1"},
      {{1, 2}, {2, 2}, "rank 1 sends 1 rows to rank 0, which expects 2"}};
  on_ranks_of(2, [&](int64_t rank, const DeviceMesh& mesh) {
    const Tensor rows = at::zeros({rank == 0 ? 4 : 3, 2});
    for (const auto& [to, from, error] : cases) {
      const auto given = rank == 0 ? Case{{2, 2}, {2, 2}, ""} : Case{to, from, ""};
      expect_error<c10::ValueError>(
          [&] { static_cast<void>(all_to_all(rows, given.to, given.from, mesh)); },
          HasSubstr(error));
    }
    const std::vector<int64_t> to =
        rank == 0 ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{2, 1};
    EXPECT_EQ(all_to_all(rows, to, rank == 0 ? to : std::vector<int64_t>{2, 1}, mesh).size(0),
              rank == 0 ? 4 : 3);
  });
}

// One rank has no expert, and gives its rows back; the other's make nothing of them.
TEST(RouteToExperts, WhatExpertsDoNotReadComesBackOnAllRanks) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    Batch batch = batch_of(rank, 3, 1, false);
    batch.tokens.requires_grad_();
    const Tensor scale = at::ones({}, at::kDouble).requires_grad_();
    const auto result = route_to_experts(
        batch.tokens, {.experts = batch.experts, .weights = batch.weights, .count = 1}, mesh,
        [&](const Tensor& rows, const Tensor& counts) {
          return counts.numel() == 0 ? rows : rows.detach() * scale;
        });
    result.sum().backward();
    EXPECT_EQ(batch.tokens.grad().abs().sum().item<double>(), 0);
    EXPECT_EQ(scale.grad().defined(), rank == 0);
  });
}

TEST(RouteToExperts, WholeRoutingBesideCutTokensHasItsGradient) {
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    const Batch batch = batch_of(1, 5, 3, false);
    const Tensor tokens = distribute_tensor(batch.tokens, mesh, {Shard{0}});
    const auto square = [](const Tensor& rows, const Tensor&) { return rows.square_(); };
    const auto gradient = [&](const Tensor& of, const auto&... where) {
      const Tensor weights = batch.weights.clone().requires_grad_();
      route_to_experts(of, {.experts = batch.experts, .weights = weights, .count = 3}, where...)
          .sum()
          .backward();
      return weights.grad();
    };
    const Tensor expected = gradient(batch.tokens, square);
    EXPECT_TRUE(gradient(tokens, mesh, square).allclose(expected));
    EXPECT_TRUE(gradient(tokens, square).allclose(expected));
  });
}

TEST(ForEachExpert, CallsEachWithItsRows) {
  const Batch batch = batch_of(1, 5, 4, false);
  const Tensor matrices = waves({4, kWidth, 4}, 0.3);
  const ExpertRouting routing{.experts = batch.experts, .weights = batch.weights, .count = 4};
  const auto each = for_each_expert(
      [&](int64_t which, const Tensor& rows) { return expert(rows, matrices[which]); });
  EXPECT_TRUE(route_to_experts(batch.tokens, routing, each)
                  .allclose(on_one_device(batch, matrices), 1e-12, 1e-12));
}

TEST(GroupedLinear, OfWeightsThatAreCutOtherwiseIsRefused) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    const Tensor weights = distribute_tensor(waves({2, 4, 3}, 0.1), mesh, {Shard{1}});
    expect_error<c10::ValueError>(
        [&] {
          static_cast<void>(grouped_linear(at::zeros({2, 3}), at::ones({2}, at::kLong), weights));
        },
        AllOf(HasSubstr("'weights' is a DTensor of Shard(1)"), HasSubstr("rank")));
  });
}

}  // namespace
}  // namespace fsdp::testing
