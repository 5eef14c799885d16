// Functions of models on DTensors in all placements, on real ranks: values and gradients
// are those of plain tensors, and what moves on the way is noted.
#include "dtensor/dtensor.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/redistribute.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace fsdp {
namespace {

using internal::NotedRedistribution;
using internal::RedistributionListener;
using testing::on_meshes;
using testing::whole;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

std::vector<Placements> lists_for(const DeviceMesh& mesh, int64_t ndim) {
  Placements single{Replicate{}, Partial{}};
  for (int64_t d = 0; d < ndim; ++d) single.emplace_back(Shard{d});
  std::vector<Placements> lists{{}};
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& placement : single) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

// The sum of the result, weighted so that every element counts differently.
at::Tensor loss_of(const at::Tensor& result) {
  const at::Tensor weights = at::arange(result.numel(), at::kDouble).mul(0.37).sin();
  return whole(result).mul(weights.view(result.sizes()).to(result.dtype())).sum();
}

struct Problem {
  Tensors inputs;  // plain
  Function function;
};

struct Outcome {
  at::Tensor value;
  Tensors gradients;
};

Outcome outcome(const Function& function, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach().set_requires_grad(input.is_floating_point()));
  }
  const at::Tensor result = function(leaves);
  loss_of(result).backward();
  Outcome outcome{.value = whole(result.detach()), .gradients = {}};
  for (const at::Tensor& leaf : leaves) {
    outcome.gradients.push_back(leaf.grad().defined() ? whole(leaf.grad()) : at::Tensor());
  }
  return outcome;
}

// `plain` placed so; terms of a Partial differ from rank to rank.
at::Tensor placed(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements) {
  const DTensor cut = distribute_tensor(plain, mesh, internal::without_partials(placements));
  at::Tensor local = cut.to_local();
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto dim = static_cast<int64_t>(m);
    if (!placements[m].is_partial()) continue;
    const auto parts = static_cast<double>(mesh.size(dim));
    local = local.mul((static_cast<double>(mesh.local_rank(dim)) + 1) * 2 / (parts * (parts + 1)));
  }
  return from_local(local.clone(), mesh, placements, {.shape = plain.sizes().vec()});
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  EXPECT_TRUE(actual.allclose(expected, 1e-9, 1e-9)) << what;
}

void expect_same_outcome(const Problem& problem, const Outcome& expected, const Tensors& inputs) {
  const Outcome actual = outcome(problem.function, inputs);
  expect_close(actual.value, expected.value, "value");
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(actual.gradients[i], expected.gradients[i], "gradient");
  }
}

// `count` random choices of placements for the inputs; some stay plain.
void try_placements(const DeviceMesh& mesh, const Problem& problem, int count) {
  const Outcome expected = outcome(problem.function, problem.inputs);
  std::mt19937 random(7);
  for (int i = 0; i < count; ++i) {
    Tensors inputs;
    std::string text = to_string(mesh);
    for (const at::Tensor& plain : problem.inputs) {
      auto lists = lists_for(mesh, plain.dim());
      const Placements& list = lists[random() % lists.size()];
      const bool is_whole_number = !plain.is_floating_point();
      const bool stays_plain = !inputs.empty() && random() % 5 == 0;
      const bool has_terms =
          std::any_of(list.begin(), list.end(), [](const auto& p) { return p.is_partial(); });
      if (stays_plain || (is_whole_number && has_terms)) {
        inputs.push_back(plain);
        text += " plain";
        continue;
      }
      inputs.push_back(placed(plain, mesh, list));
      for (const Placement& placement : list) text += " " + to_string(placement);
      text += ";";
    }
    SCOPED_TRACE(text);
    expect_same_outcome(problem, expected, inputs);
  }
}

at::Tensor waves(const std::vector<int64_t>& shape, double step = 0.7) {
  return at::arange(c10::multiply_integers(shape), at::kDouble).mul(step).sin().view(shape);
}

void expect_as_plain(const std::function<Problem()>& problem, int count = 25) {
  on_meshes([&](const DeviceMesh& mesh) { try_placements(mesh, problem(), count); });
}

TEST(WaysOnRanks, Products) {
  expect_as_plain([] {
    return Problem{{waves({5, 7}), waves({7, 3}, 0.3)},
                   [](const Tensors& t) { return at::mm(t[0], t[1]); }};
  });
  expect_as_plain([] {
    return Problem{{waves({3}), waves({5, 7}), waves({7, 3}, 0.3)},
                   [](const Tensors& t) { return at::addmm(t[0], t[1], t[2], 0.5, 2); }};
  });
  expect_as_plain([] {
    return Problem{{waves({3, 5, 2}), waves({2, 5}, 0.3), waves({3, 2, 2})}, [](const Tensors& t) {
                     const at::Tensor right = t[1].unsqueeze(0).expand({3, 2, 5});
                     return at::baddbmm(t[2], right, t[0]).add(at::bmm(right, t[0]));
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({5, 7}).t(), waves({5}, 0.3)},
                   [](const Tensors& t) { return at::mv(t[0], t[1]); }};
  });
}

TEST(WaysOnRanks, LinearLayersInARow) {
  expect_as_plain([] {
    return Problem{{waves({5, 6}), waves({7, 6}, 0.3), waves({7}), waves({3, 7}, 0.2)},
                   [](const Tensors& t) {
                     const at::Tensor hidden = at::addmm(t[2], t[0], t[1].t());
                     return at::mm(at::gelu(hidden), t[3].t());
                   }};
  });
}

// What torch::nn::functional::linear does: the bias is added in place, to terms too.
TEST(WaysOnRanks, LinearAddsItsBiasInPlace) {
  expect_as_plain([] {
    return Problem{{waves({5, 6}), waves({7, 6}, 0.3), waves({7}, 0.2)}, [](const Tensors& t) {
                     at::Tensor result = at::matmul(t[0], t[1].t());
                     return result.add_(t[2]);
                   }};
  });
}

TEST(WaysOnRanks, Elementwise) {
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({4}, 0.3), waves({5, 1}, 0.2)}, [](const Tensors& t) {
                     const at::Tensor sum = t[0].add(t[1], 2).sub(1.5).add(t[2]);
                     return sum.mul(t[1]).div(t[2].abs().add(1)).mul(0.5).neg();
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({5, 4}, 0.3)}, [](const Tensors& t) {
                     return at::where(t[0] > 0, t[1], t[0].mul(t[1])).masked_fill(t[1] > 0.5, 2);
                   }};
  });
}

TEST(WaysOnRanks, PlainTensorsTakeTheWholeValue) {
  on_meshes([](const DeviceMesh& mesh) {
    for (const Placements& list : lists_for(mesh, 2)) {
      const at::Tensor plain = waves({5, 4});
      plain.add_(placed(waves({5, 4}, 0.3), mesh, list), 2);
      EXPECT_TRUE(plain.allclose(waves({5, 4}).add(waves({5, 4}, 0.3), 2))) << to_string(mesh);
    }
  });
}

// As between plain tensors: the number does not decide the dtype.
TEST(WaysOnRanks, NumbersAddedToTermsKeepTheDtype) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor terms = from_local(at::ones({}, at::kFloat), mesh, {Partial{}});
    const at::Tensor sum = terms.add(at::native::wrapped_scalar_tensor(0.5));
    EXPECT_EQ(sum.scalar_type(), at::kFloat);
    EXPECT_EQ(DTensor(sum).placements(), Placements{Partial{}});
    EXPECT_EQ(whole(sum).item<float>(), 2.5F);
  });
}

TEST(WaysOnRanks, Embedding) {
  expect_as_plain([] {
    return Problem{{waves({7, 3}), at::tensor({3, 0, 6, 3, 2, 2}, at::kLong).view({2, 3})},
                   [](const Tensors& t) { return at::embedding(t[0], t[1], 2); }};
  });
}

TEST(WaysOnRanks, LayerNorm) {
  expect_as_plain([] {
    return Problem{{waves({5, 2, 3}), waves({3}, 0.3), waves({3}, 0.2)},
                   [](const Tensors& t) { return at::layer_norm(t[0], {3}, t[1], t[2]); }};
  });
}

TEST(WaysOnRanks, Softmax) {
  for (int64_t dim : {0, 1, 2}) {
    expect_as_plain([dim] {
      return Problem{{waves({5, 2, 3})}, [dim](const Tensors& t) {
                       return at::softmax(t[0], dim).add(at::log_softmax(t[0], dim));
                     }};
    });
  }
}

TEST(WaysOnRanks, CrossEntropy) {
  for (const int64_t reduction : {0, 1, 2}) {
    for (const double smoothing : {0.0, 0.1}) {
      expect_as_plain(
          [reduction, smoothing] {
            return Problem{
                {waves({5, 4}), at::tensor({3, 0, -100, 2, 2}, at::kLong)}, [=](const Tensors& t) {
                  return at::cross_entropy_loss(t[0], t[1], {}, reduction, -100, smoothing);
                }};
          },
          12);
    }
  }
}

TEST(WaysOnRanks, Attention) {
  for (const bool is_causal : {false, true}) {
    expect_as_plain(
        [is_causal] {
          return Problem{{waves({3, 4, 5, 8}), waves({3, 4, 5, 8}, 0.3), waves({3, 4, 5, 8}, 0.2)},
                         [is_causal](const Tensors& t) {
                           return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0,
                                                                   is_causal);
                         }};
        },
        15);
  }
}

TEST(WaysOnRanks, Convolution) {
  expect_as_plain([] {
    return Problem{{waves({3, 2, 9}), waves({4, 2, 3}, 0.3), waves({4})},
                   [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2], 2, 1); }};
  });
}

TEST(WaysOnRanks, OperatorsWithoutARuleGather) {
  expect_as_plain([] {
    return Problem{{waves({5, 4})}, [](const Tensors& t) {
                     return at::constant_pad_nd(at::glu(t[0], 1), {1, 2}, 0.5)
                         .add(at::log_sigmoid(t[0]).mean());
                   }};
  });
  expect_as_plain([] {
    return Problem{{waves({5, 4}), waves({5, 4}, 0.3)},
                   [](const Tensors& t) { return at::huber_loss(t[0], t[1]); }};
  });
}

// What an operator moves, as "operand: from -> to (cause)".
std::vector<std::string> moves_of(const std::function<void()>& body) {
  std::vector<std::string> moves;
  const RedistributionListener listener([&moves](const NotedRedistribution& noted) {
    const bool by_rule = noted.cause == NotedRedistribution::Cause::kWay;
    moves.push_back(noted.operator_name + " " + std::to_string(noted.operand) + ": " +
                    to_string(noted.from.placements[0]) + " -> " + to_string(noted.to[0]) +
                    (by_rule ? "" : " (no rule)"));
  });
  body();
  return moves;
}

TEST(WaysOnRanks, WhatMovesIsNoted) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto rows = distribute_tensor(waves({8, 4}), mesh, {Shard{0}});
    const auto columns = distribute_tensor(waves({4, 2}), mesh, {Shard{1}});
    const auto inner = distribute_tensor(waves({4, 2}), mesh, {Shard{0}});
    EXPECT_THAT(moves_of([&] { at::mm(rows, columns); }),
                ::testing::ElementsAre("aten::mm 1: Shard(1) -> Replicate()"));
    EXPECT_THAT(moves_of([&] { at::mm(columns.t(), inner); }), ::testing::SizeIs(1));
    EXPECT_THAT(moves_of([&] { at::mm(rows, waves({4, 2})); }), ::testing::IsEmpty());
    EXPECT_THAT(moves_of([&] { at::mm(rows.redistribute({Shard{1}}), inner); }),
                ::testing::IsEmpty());
    const at::Tensor terms = from_local(waves({8, 4}), mesh, {Partial{}});
    EXPECT_THAT(moves_of([&] { rows.add(terms); }),
                ::testing::ElementsAre("aten::add.Tensor 1: Partial(sum) -> Shard(0)"));
    EXPECT_THAT(moves_of([&] { terms.add(waves({4})).mul(waves({8, 4})); }), ::testing::IsEmpty());
    EXPECT_THAT(moves_of([&] { at::nonzero(rows); }),
                ::testing::ElementsAre("aten::nonzero 0: Shard(0) -> Replicate() (no rule)"));
  });
}

}  // namespace
}  // namespace fsdp
