// Functions of models on DTensors in all placements, on real ranks: values and gradients
// are those of plain tensors, and what moves on the way is noted.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp {
namespace {

using testing::expect_as_plain;
using testing::lists_for;
using testing::on_meshes;
using testing::placed;
using testing::Problem;
using testing::waves;
using testing::whole;
using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

TEST(StrategiesOnRanks, Products) {
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

TEST(StrategiesOnRanks, LinearLayersInARow) {
  expect_as_plain([] {
    return Problem{{waves({5, 6}), waves({7, 6}, 0.3), waves({7}), waves({3, 7}, 0.2)},
                   [](const Tensors& t) {
                     const at::Tensor hidden = at::addmm(t[2], t[0], t[1].t());
                     return at::mm(at::gelu(hidden), t[3].t());
                   }};
  });
}

// What torch::nn::functional::linear does: the bias is added in place, to terms too.
TEST(StrategiesOnRanks, LinearAddsItsBiasInPlace) {
  expect_as_plain([] {
    return Problem{{waves({5, 6}), waves({7, 6}, 0.3), waves({7}, 0.2)}, [](const Tensors& t) {
                     at::Tensor result = at::matmul(t[0], t[1].t());
                     return result.add_(t[2]);
                   }};
  });
}

TEST(StrategiesOnRanks, Elementwise) {
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

TEST(StrategiesOnRanks, PlainTensorsTakeTheWholeValue) {
  on_meshes([](const DeviceMesh& mesh) {
    for (const Placements& list : lists_for(mesh, 2)) {
      const at::Tensor plain = waves({5, 4});
      plain.add_(placed(waves({5, 4}, 0.3), mesh, list), 2);
      EXPECT_TRUE(plain.allclose(waves({5, 4}).add(waves({5, 4}, 0.3), 2))) << to_string(mesh);
    }
  });
}

// As between plain tensors: the number does not decide the dtype.
TEST(StrategiesOnRanks, NumbersAddedToTermsKeepTheDtype) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor terms = from_local(at::ones({}, at::kFloat), mesh, {Partial{}});
    const at::Tensor sum = terms.add(at::native::wrapped_scalar_tensor(0.5));
    EXPECT_EQ(sum.scalar_type(), at::kFloat);
    EXPECT_EQ(DTensor(sum).placements(), Placements{Partial{}});
    EXPECT_EQ(whole(sum).item<float>(), 2.5F);
  });
}

TEST(StrategiesOnRanks, Embedding) {
  expect_as_plain([] {
    return Problem{{waves({7, 3}), at::tensor({3, 0, 6, 3, 2, 2}, at::kLong).view({2, 3})},
                   [](const Tensors& t) { return at::embedding(t[0], t[1], 2); }};
  });
}

TEST(StrategiesOnRanks, LayerNorm) {
  expect_as_plain([] {
    return Problem{{waves({5, 2, 3}), waves({3}, 0.3), waves({3}, 0.2)},
                   [](const Tensors& t) { return at::layer_norm(t[0], {3}, t[1], t[2]); }};
  });
}

TEST(StrategiesOnRanks, Softmax) {
  for (int64_t dim : {0, 1, 2}) {
    expect_as_plain([dim] {
      return Problem{{waves({5, 2, 3})}, [dim](const Tensors& t) {
                       return at::softmax(t[0], dim).add(at::log_softmax(t[0], dim));
                     }};
    });
  }
}

TEST(StrategiesOnRanks, CrossEntropy) {
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

TEST(StrategiesOnRanks, Attention) {
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

// Where queries and keys are not cut between the same groups.
TEST(StrategiesOnRanks, AttentionOfGroupedHeads) {
  for (const int64_t groups : {1, 2}) {
    expect_as_plain(
        [groups] {
          return Problem{
              {waves({3, 4, 5, 8}), waves({3, groups, 6, 8}, 0.3), waves({3, groups, 6, 8}, 0.2)},
              [](const Tensors& t) {
                return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, false,
                                                        std::nullopt, /*enable_gqa=*/true);
              }};
        },
        15);
  }
}

TEST(StrategiesOnRanks, CrossEntropyOfImages) {
  for (const int64_t reduction : {0, 1, 2}) {
    expect_as_plain(
        [reduction] {
          return Problem{
              {waves({3, 4, 2}), at::tensor({3, 0, -100, 2, 2, 1}, at::kLong).view({3, 2})},
              [=](const Tensors& t) {
                return at::cross_entropy_loss(t[0], t[1], waves({4}).abs(), reduction);
              }};
        },
        12);
  }
}

TEST(StrategiesOnRanks, ExtremaAndTheirPlaces) {
  for (const int64_t dim : {0, 1, -1}) {
    for (const bool keepdim : {false, true}) {
      expect_as_plain([=] {
        return Problem{
            {waves({5, 2, 3})}, [=](const Tensors& t) {
              const auto [greatest, at] = t[0].max(dim, keepdim);
              const auto [least, where] = t[0].min(dim, keepdim);
              const at::Tensor places =
                  t[0].argmax(dim, keepdim).add(t[0].argmin(dim, keepdim)).add(at).add(where);
              return greatest.mul(least).mul(places);
            }};
      });
    }
    expect_as_plain([=] {
      return Problem{{waves({5, 2, 3})}, [=](const Tensors& t) {
                       const auto [greatest, at] = t[0].topk(2, dim);
                       const auto [least, where] = t[0].topk(2, dim, /*largest=*/false);
                       return greatest.mul(least).mul(at.add(where));
                     }};
    });
  }
}

// The first of equal ones, and a NaN before all, as on one device.
TEST(StrategiesOnRanks, ExtremaAreTheFirstOnes) {
  on_meshes([](const DeviceMesh& mesh) {
    at::Tensor plain = at::ones({3, 12}, at::kDouble);
    plain[1][7] = std::numeric_limits<double>::quiet_NaN();
    plain[2][4] = plain[2][9] = 2;
    for (const Placements& list : lists_for(mesh, 2)) {
      const at::Tensor t = placed(plain, mesh, list);
      EXPECT_TRUE(whole(t.argmax(1)).equal(plain.argmax(1)));
      EXPECT_TRUE(whole(std::get<1>(t.min(1))).equal(std::get<1>(plain.min(1))));
    }
    Placements list(static_cast<size_t>(mesh.ndim()), Replicate{});
    list.back() = Shard{.dim = 1, .outer = 3, .unit = 2};
    const at::Tensor t = placed(plain, mesh, list);
    EXPECT_TRUE(whole(t.argmax(1)).equal(plain.argmax(1)));
  });
}

TEST(StrategiesOnRanks, ExtremaMoveANumberOrTwoPerRow) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto columns = distribute_tensor(waves({4, 100}), mesh, {Shard{1}});
    const auto bytes_of = [&](const std::function<void()>& body) {
      int64_t bytes = 0;
      const internal::CommListener listener(
          [&](const internal::CommEvent& event) { bytes += event.bytes; });
      body();
      return bytes;
    };
    EXPECT_EQ(bytes_of([&] { columns.argmax(1); }), 4 * (8 + 8));
    EXPECT_EQ(bytes_of([&] { columns.max(1); }), 4 * (8 + 8));
    EXPECT_EQ(bytes_of([&] { columns.topk(3, 1); }), 4 * 3 * (8 + 8));
    EXPECT_EQ(bytes_of([&] { columns.argmax(0); }), 0);
  });
}

TEST(StrategiesOnRanks, Convolution) {
  expect_as_plain([] {
    return Problem{{waves({3, 2, 9}), waves({4, 2, 3}, 0.3), waves({4})},
                   [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2], 2, 1); }};
  });
}

TEST(StrategiesOnRanks, OperatorsWithoutARuleGather) {
  expect_as_plain([] {
    return Problem{
        {waves({5, 4})}, [](const Tensors& t) {
          return at::constant_pad_nd(t[0], {1, 2}, 0.5).add(at::renorm(t[0], 2, 0, 1.5).mean());
        }};
  });
}

// What an operator moves, as "operator: from -> to (whole)".
std::vector<std::string> moves_of(const std::function<void()>& body) {
  std::vector<std::string> moves;
  const internal::CommListener listener([&moves](const internal::CommEvent& event) {
    const bool whole = event.cause == internal::CommCause::kWhole;
    moves.push_back(event.operator_name + ": " + to_string(event.from) + " -> " +
                    to_string(event.to) + (whole ? " (whole)" : ""));
  });
  body();
  return moves;
}

TEST(StrategiesOnRanks, WhatMovesIsNoted) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto rows = distribute_tensor(waves({8, 4}), mesh, {Shard{0}});
    const auto columns = distribute_tensor(waves({4, 2}), mesh, {Shard{1}});
    const auto inner = distribute_tensor(waves({4, 2}), mesh, {Shard{0}});
    EXPECT_THAT(moves_of([&] { at::mm(rows, columns); }),
                ::testing::ElementsAre("aten::mm: Shard(1) -> Replicate()"));
    EXPECT_THAT(moves_of([&] { at::mm(columns.t(), inner); }), ::testing::SizeIs(1));
    EXPECT_THAT(moves_of([&] { at::mm(rows, waves({4, 2})); }), ::testing::IsEmpty());
    const at::Tensor turned = rows.redistribute({Shard{1}});
    EXPECT_THAT(moves_of([&] { at::mm(turned, inner); }), ::testing::IsEmpty());
    const at::Tensor terms = from_local(waves({8, 4}), mesh, {Partial{}});
    EXPECT_THAT(moves_of([&] { rows.add(terms); }),
                ::testing::ElementsAre("aten::add: Partial(sum) -> Shard(0)"));
    EXPECT_THAT(moves_of([&] { terms.add(waves({4})).mul(waves({8, 4})); }), ::testing::IsEmpty());
    EXPECT_THAT(moves_of([&] { terms.clone().masked_fill_(at::ones({4}, at::kBool), 0); }),
                ::testing::IsEmpty());
    EXPECT_THAT(moves_of([&] { terms.masked_fill(at::ones({4}, at::kBool), 2); }),
                ::testing::SizeIs(1));
    EXPECT_THAT(moves_of([&] { at::nonzero(rows); }),
                ::testing::ElementsAre("aten::nonzero: Shard(0) -> Replicate() (whole)"));
  });
}

// Keys that every rank has, more ranks than heads: nothing moves.
TEST(StrategiesOnRanks, AttentionOfCutQueriesMovesNothing) {
  testing::run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {4});
    const auto attention = [](const at::Tensor& query, const at::Tensor& key) {
      at::scaled_dot_product_attention(query, key, key, {}, 0.0, false, std::nullopt,
                                       /*enable_gqa=*/true);
    };
    for (const int64_t heads : {3, 6}) {
      const auto query = distribute_tensor(waves({2, heads, 5, 8}), mesh, {Shard{1}});
      const auto keys = distribute_tensor(waves({2, 3, 5, 8}), mesh, {Replicate{}});
      EXPECT_THAT(moves_of([&] { attention(query, keys); }), ::testing::IsEmpty());
      EXPECT_THAT(moves_of([&] { attention(query, query); }), ::testing::IsEmpty());
    }
  });
}

}  // namespace
}  // namespace fsdp
