// Operators that optimizer, clipping and averaging code uses on parameters and states,
// beside the plain results.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp {
namespace {

using testing::error_of;
using testing::expect_same;
using ::testing::HasSubstr;
using testing::on_placements;
using testing::on_worlds;
using testing::whole;
using Tensors = std::vector<at::Tensor>;

TEST(StateOperators, Elementwise) {
  expect_same({
      {"lerp",
       [](const auto& t) {
         return Tensors{t.lerp(t.neg(), 0.25), t.lerp(t.mul(3), t.sigmoid())};
       }},
      {"addcmul", [](const auto& t) { return Tensors{t.addcmul(t, t.sign(), -0.5)}; }},
      {"addcdiv", [](const auto& t) { return Tensors{t.addcdiv(t, t.abs().add(1), 0.5)}; }},
      {"max, min",
       [](const auto& t) {
         return Tensors{at::max(t, t.neg()), at::min(t, t.mul(2))};
       }},
      {"clamp",
       [](const auto& t) {
         return Tensors{t.clamp(-1, 2), t.clamp_min(0), t.clamp(t.neg(), t.abs())};
       }},
      {"sign",
       [](const auto& t) {
         return Tensors{t.sign(), t.abs(), t.square(), t.reciprocal().nan_to_num()};
       }},
      {"pow",
       [](const auto& t) {
         return Tensors{t.pow(2), t.abs().pow(0.5), at::pow(2, t)};
       }},
      {"isnan",
       [](const auto& t) {
         return Tensors{t.sqrt().isnan(), t.isfinite(), t.log().isinf()};
       }},
      {"compare",
       [](const auto& t) {
         return Tensors{t == t, t != 1, t < t.neg(), t >= 0, t.isclose(t)};
       }},
      {"logic",
       [](const auto& t) {
         return Tensors{(t > 0).logical_and(t < 5), (t > 0) | (t < -5), ~(t > 0)};
       }},
      {"where",
       [](const auto& t) {
         return Tensors{at::where(t > 0, t, 0), t.masked_fill(t < 0, 3)};
       }},
      {"tril",
       [](const auto& t) {
         return Tensors{t.unsqueeze(2).unsqueeze(3).expand({-1, -1, 3, 3}).tril()};
       }},
      {"square root of a sum",
       [](const auto& t) { return Tensors{t.square().sum().sqrt().add(t)}; }},
  });
}

TEST(StateOperators, Reductions) {
  expect_same(
      {
          {"var",
           [](const auto& t) {
             return Tensors{t.var(), t.var(0), t.var({1}, false, true)};
           }},
          {"std",
           [](const auto& t) {
             return Tensors{t.std(), t.std({0}, true, true), t.std(1)};
           }},
          {"var_mean",
           [](const auto& t) {
             const auto [variance, mean] = at::var_mean(t, at::IntArrayRef{0});
             const auto [deviation, same] = at::std_mean(t);
             return Tensors{variance, mean, deviation, same};
           }},
          {"mean",
           [](const auto& t) {
             return Tensors{t.mean(), t.mean(at::OptionalIntArrayRef({0, 1}), true),
                            t.to(at::kInt).mean(at::kFloat)};
           }},
          {"norms",
           [](const auto& t) {
             return Tensors{t.norm(), at::linalg_vector_norm(t, 3, at::IntArrayRef{0}),
                            at::linalg_norm(t), t.norm(1, 1)};
           }},
          {"counts",
           [](const auto& t) {
             return Tensors{t.count_nonzero(), t.count_nonzero(std::optional<int64_t>(0))};
           }},
          {"nansum",
           [](const auto& t) {
             return Tensors{t.sqrt().nansum(), t.sqrt().nansum(0)};
           }},
          {"aminmax",
           [](const auto& t) {
             const auto [low, high] = at::aminmax(t);
             const auto [low_rows, high_rows] = at::aminmax(t, 0, true);
             return Tensors{low, high, low_rows, high_rows};
           }},
          {"all, any",
           [](const auto& t) {
             return Tensors{(t == t).all(), t.isnan().any(), (t > 0).any(0), t.isfinite().all()};
           }},
          {"dot",
           [](const auto& t) {
             const auto row = t.sum(0);
             return Tensors{at::dot(row, row.neg()), at::vdot(row, row)};
           }},
      },
      1e-5);
}

// Where the dimension is cut it is gathered.
TEST(StateOperators, AlongADimension) {
  for (int64_t dim : {0, 1}) {
    expect_same({
        {"cumsum", [dim](const auto& t) { return Tensors{t.cumsum(dim)}; }},
        {"cumprod", [dim](const auto& t) { return Tensors{t.sign().cumprod(dim)}; }},
        {"softmax", [dim](const auto& t) { return Tensors{t.softmax(dim)}; }},
        {"log_softmax", [dim](const auto& t) { return Tensors{t.log_softmax(dim)}; }},
        {"logsumexp", [dim](const auto& t) { return Tensors{t.logsumexp(dim)}; }},
        {"sort",
         [dim](const auto& t) {
           return Tensors{std::get<0>(t.sort(dim)), std::get<0>(t.sort(dim, true))};
         }},
        {"topk", [dim](const auto& t) { return Tensors{std::get<0>(t.topk(2, dim))}; }},
        {"max",
         [dim](const auto& t) {
           return Tensors{std::get<0>(t.max(dim)), std::get<0>(t.min(dim, true))};
         }},
        {"argmax",
         [dim](const auto& t) {
           return Tensors{t.argmax(dim), t.argmin(dim, true)};
         }},
        {"median",
         [dim](const auto& t) {
           return Tensors{std::get<0>(t.median(dim)), std::get<0>(t.kthvalue(1, dim))};
         }},
        {"flip", [dim](const auto& t) { return Tensors{t.flip(dim)}; }},
        {"roll", [dim](const auto& t) { return Tensors{t.roll(1, dim)}; }},
        {"tril",
         [](const auto& t) {
           return Tensors{t.tril(), t.triu(1)};
         }},
    });
  }
}

TEST(StateOperators, JoinsAlongAnyDimension) {
  for (int64_t dim : {0, 1}) {
    expect_same({{"cat", [dim](const auto& t) { return Tensors{at::cat({t, t.neg(), t}, dim)}; }}});
  }
  expect_same({{"stack",
                [](const auto& t) {
                  return Tensors{at::stack({t, t.mul(2)}), at::stack({t, t}, 2)};
                }},
               {"stack of sums", [](const auto& t) {
                  return Tensors{at::stack({t.sum(), t.mean()}).sum()};
                }}});
}

TEST(StateOperators, InPlaceKeepsPlacementsAndMemory) {
  on_worlds([](const DeviceMesh& mesh) {
    on_placements(mesh, [](const at::Tensor& dtensor, const at::Tensor& plain) {
      const auto placements = DTensor(dtensor).placements();
      if (placements[0].is_partial()) return;
      const void* const memory = DTensor(dtensor).to_local().data_ptr();
      const at::Tensor expected = plain.clone();
      for (const at::Tensor& t : {dtensor, expected}) {
        t.lerp_(t.sign(), 0.5).addcmul_(t, t, 0.125).addcdiv_(t, t.abs().add(1), -1).clamp_(-3, 3);
        t.masked_fill_(t.gt(2), 0.5)
            .nan_to_num_()
            .sub_(t.mean())
            .div_(t.norm().add(1))
            .copy_(t.mean(0));
        if (!placements[0].is_shard(1)) t.cumsum_(1);
      }
      EXPECT_TRUE(at::allclose(whole(dtensor), expected, 1e-5, 1e-6));
      EXPECT_EQ(DTensor(dtensor).placements(), placements);
      EXPECT_EQ(DTensor(dtensor).to_local().data_ptr(), memory);
    });
  });
}

TEST(StateOperators, ForeachFamilies) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor a = at::arange(10, at::kFloat).view({5, 2}).add(1);
    const at::Tensor b = at::arange(6, at::kFloat).view({2, 3}).add(1);
    const Tensors plain{a.clone(), b.clone()};
    const Tensors sharded{distribute_tensor(a, mesh, {Shard{0}}),
                          distribute_tensor(b, mesh, {Shard{0}})};
    const auto steps = [](const Tensors& list) {
      const std::vector<at::Scalar> scalars{0.5, 2.0};
      at::_foreach_add_(list, scalars);
      at::_foreach_sub_(list, 0.25);
      at::_foreach_mul_(list, scalars);
      at::_foreach_div_(list, at::_foreach_add(list, 1));
      at::_foreach_maximum_(list, 0.1);
      at::_foreach_minimum_(list, list);
      at::_foreach_clamp_max_(list, 5);
      at::_foreach_clamp_min_(list, scalars);
      at::_foreach_pow_(list, 2);
      at::_foreach_addcmul_(list, list, list, scalars);
      at::_foreach_addcdiv_(list, list, list, at::tensor({0.5, 0.25}));
      at::_foreach_lerp_(list, at::_foreach_sign(list), at::_foreach_reciprocal(list));
      at::_foreach_lerp_(list, at::_foreach_sqrt(list), 0.75);
      at::_foreach_exp_(list);
      at::_foreach_neg_(list);
      at::_foreach_round_(list);
      return at::_foreach_max(at::_foreach_pow(2, list));
    };
    const auto expected = steps(plain);
    const auto actual = steps(sharded);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(whole(sharded[i]).equal(plain[i]));
      EXPECT_TRUE(whole(actual[i]).equal(expected[i]));
    }
    at::_foreach_add_(sharded, plain);
    at::_foreach_add_(plain, plain);
    EXPECT_TRUE(whole(sharded[0]).equal(plain[0]));
  });
}

TEST(StateOperators, SizesThatValuesDecideAreTheSameOnAllRanks) {
  expect_same(
      {{"nonzero", [](const auto& t) { return Tensors{(t > 1).nonzero()}; }},
       {"masked_select", [](const auto& t) { return Tensors{t.masked_select(t > 1)}; }},
       {"index by mask", [](const auto& t) { return Tensors{t.index({t > 1})}; }},
       {"index by mask of rows", [](const auto& t) { return Tensors{t.index({t.sum(1) > 1})}; }}});
}

TEST(StateOperators, MoreThanOneElementIsNoNumber) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor t =
        distribute_tensor(at::arange(10, at::kFloat).view({5, 2}), mesh, {Shard{0}});
    EXPECT_THAT(error_of([&] {
                  if (t.sum().gt(0).is_nonzero()) t.item();
                }),
                HasSubstr("cannot be converted to Scalar"));
  });
}

TEST(StateOperators, AnotherMeshIsNamed) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto other = init_device_mesh(c10::kCPU, {2, 1});
    const at::Tensor plain = at::ones({4, 2});
    const at::Tensor a = distribute_tensor(plain, mesh, {Shard{0}});
    const at::Tensor b = distribute_tensor(plain, other, {Shard{0}, Replicate{}});
    const at::Tensor c = distribute_tensor(plain, mesh, {Replicate{}});
    const at::Tensor d = distribute_tensor(plain, other, {Replicate{}, Replicate{}});
    for (const auto& body : std::vector<std::function<void()>>{
             [&] { a.add(b); }, [&] { a.mul_(b); }, [&] { at::_foreach_add_({a}, {b}); },
             [&] {
               at::cat({a, b}, 1);
             },
             [&] {
               at::stack({a, b});
             },
             [&] { a.copy_(b); }, [&] { at::equal(a, b); }, [&] { a.lerp(b, 0.5); },
             [&] { at::where(a > 0, b, a); }, [&] { at::mm(c, d.t()); },
             [&] { at::dot(a.view({-1}), b.view({-1})); }}) {
      EXPECT_THAT(error_of(body),
                  ::testing::AnyOf(HasSubstr("different meshes"), HasSubstr("the meshes differ")));
    }
  });
}

}  // namespace
}  // namespace fsdp
