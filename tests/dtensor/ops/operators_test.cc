// Operators on DTensors against the same operators on plain tensors, on worlds of 1 to 3
// with empty shards.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/partial_values.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace fsdp {
namespace {

using testing::on_placements;
using testing::on_worlds;
using testing::whole;
using Placements = std::vector<Placement>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void expect_same(const char* name, const std::function<at::Tensor(const at::Tensor&)>& function,
                 double tolerance = 1e-6) {
  const auto as_list = [&function](const at::Tensor& t) {
    return std::vector<at::Tensor>{function(t)};
  };
  testing::expect_same({{name, as_list}}, tolerance);
}

TEST(Operators, Pointwise) {
  expect_same("abs", [](const auto& t) { return t.abs(); });
  expect_same("neg", [](const auto& t) { return t.neg(); });
  expect_same("sqrt", [](const auto& t) { return t.abs().sqrt(); });
  expect_same("add self", [](const auto& t) { return t.add(t, 2); });
  expect_same("sub scalar", [](const auto& t) { return t.sub(1.5); });
  expect_same("mul scalar", [](const auto& t) { return t.mul(3); });
  expect_same("mul self", [](const auto& t) { return t * t; });
  expect_same("div scalar", [](const auto& t) { return t.div(4); });
  expect_same("clamp", [](const auto& t) { return t.clamp(-2, 2); });
  expect_same("gt", [](const auto& t) { return t.gt(0); });
  expect_same("where", [](const auto& t) { return at::where(t.gt(0), t, t.neg()); });
  expect_same("addcmul", [](const auto& t) { return t.addcmul(t, t, 0.5); });
  expect_same("lerp", [](const auto& t) { return t.lerp(t.mul(2), 0.25); });
  expect_same("broadcast", [](const auto& t) { return t.mul(t.amax(1, true)); });
  expect_same("to double", [](const auto& t) { return t.to(at::kDouble); });
  expect_same("to int", [](const auto& t) { return t.mul(2).to(at::kInt); });
  expect_same("clone", [](const auto& t) { return t.clone(); });
}

TEST(Operators, InPlaceKeepsPlacements) {
  on_worlds([](const DeviceMesh& mesh) {
    on_placements(mesh, [](const at::Tensor& dtensor, const at::Tensor& plain) {
      const auto before = DTensor(dtensor).placements();
      const at::Tensor expected = plain.clone();
      if (!before[0].is_partial() || before[0] == Placement(Partial{})) {
        for (const at::Tensor& t : {dtensor, expected}) t.mul_(2).neg_().div_(4);
      }
      if (!before[0].is_partial()) {
        for (const at::Tensor& t : {dtensor, expected}) t.add_(1).addcdiv_(t, t.abs().add(1), 0.5);
      }
      EXPECT_EQ(DTensor(dtensor).placements(), before);
      EXPECT_TRUE(at::allclose(whole(dtensor), expected));
      dtensor.zero_();
      EXPECT_TRUE(whole(dtensor).eq(0).all().item<bool>());
    });
  });
}

TEST(Operators, Reductions) {
  expect_same("sum", [](const auto& t) { return t.sum(); });
  expect_same("sum rows", [](const auto& t) { return t.sum(0); });
  expect_same("sum columns kept", [](const auto& t) { return t.sum(1, true); });
  expect_same("mean", [](const auto& t) { return t.mean(); });
  expect_same("mean rows", [](const auto& t) { return t.mean(0); });
  expect_same("amax", [](const auto& t) { return t.amax(); });
  expect_same("amin rows", [](const auto& t) { return t.amin(0); });
  expect_same("max", [](const auto& t) { return t.max(); });
  expect_same("min", [](const auto& t) { return t.min(); });
  expect_same("max of ints", [](const auto& t) { return t.mul(2).to(at::kInt).max(); });
  expect_same("prod", [](const auto& t) { return t.sign().prod(); });
  expect_same("any", [](const auto& t) { return t.gt(8).any(); });
  expect_same("all", [](const auto& t) { return t.gt(-11).all(); });
}

// A copy of terms is terms; what a conversion rounds must be their sum. Both are one
// operator, in calls that differ by their dtype alone.
TEST(Operators, ConversionsRoundTheSumsOfTerms) {
  on_worlds([](const DeviceMesh& mesh) {
    const auto terms = from_local(at::full({4}, 0.6, at::kDouble), mesh, {Partial{}});
    const double sum = 0.6 * static_cast<double>(mesh.size());
    const DTensor copied(terms.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
    EXPECT_TRUE(copied.full_tensor().allclose(at::full({4}, sum, at::kDouble)));
    const DTensor rounded(terms.to(at::kLong));
    EXPECT_TRUE(rounded.full_tensor().equal(at::full({4}, static_cast<int64_t>(sum), at::kLong)));
  });
}

TEST(Operators, NormsGiveTheTrueValueOnAllRanks) {
  for (double p : {0.0, 1.0, 2.0, 3.0, kInfinity, -kInfinity}) {
    on_worlds([p](const DeviceMesh& mesh) {
      on_placements(mesh, [p](const at::Tensor& dtensor, const at::Tensor& plain) {
        const double expected = plain.norm(p).item<double>();
        EXPECT_NEAR(dtensor.norm(p).item<double>(), expected, 1e-5 * expected) << p;
        EXPECT_NEAR(at::linalg_vector_norm(dtensor, p).item<double>(), expected, 1e-5 * expected)
            << p;
        const auto norms = at::_foreach_norm({dtensor, dtensor.add(dtensor)}, p);
        const double doubled = plain.mul(2).norm(p).item<double>();
        EXPECT_NEAR(norms[0].item<double>(), expected, 1e-5 * expected) << p;
        EXPECT_NEAR(norms[1].item<double>(), doubled, 1e-5 * doubled) << p;
      });
    });
  }
  expect_same(
      "norm of rows", [](const auto& t) { return t.norm(2, {0}, false); }, 1e-5);
  expect_same(
      "norm of columns", [](const auto& t) { return t.norm(2, {1}, true); }, 1e-5);
}

TEST(Operators, ValuesForTheCaller) {
  on_worlds([](const DeviceMesh& mesh) {
    on_placements(mesh, [](const at::Tensor& dtensor, const at::Tensor& plain) {
      EXPECT_FLOAT_EQ(dtensor.sum().item<float>(), plain.sum().item<float>());
      EXPECT_EQ(dtensor.gt(100).any().is_nonzero(), false);
      EXPECT_TRUE(at::equal(dtensor, dtensor));
      EXPECT_FALSE(at::equal(dtensor, dtensor.add(1)));
      EXPECT_TRUE(at::allclose(dtensor, DTensor(dtensor).redistribute({Replicate{}})));
      EXPECT_TRUE(at::allclose(whole(dtensor), plain));
    });
    // Every rank hears of a difference that only one of them sees.
    const auto ranks =
        from_local(at::full({1}, static_cast<double>(mesh.rank())), mesh, {Shard{0}});
    EXPECT_EQ(at::equal(ranks, at::zeros({mesh.size()})), mesh.size() == 1);
  });
}

TEST(Operators, NewTensorsLieAsTheirModel) {
  on_worlds([](const DeviceMesh& mesh) {
    on_placements(mesh, [](const at::Tensor& dtensor, const at::Tensor& plain) {
      EXPECT_TRUE(whole(at::zeros_like(dtensor)).equal(at::zeros_like(plain)));
      EXPECT_TRUE(whole(at::ones_like(dtensor)).equal(at::ones_like(plain)));
      EXPECT_TRUE(whole(at::full_like(dtensor, 3)).equal(at::full_like(plain, 3)));
      EXPECT_TRUE(whole(dtensor.new_zeros(dtensor.sizes())).equal(at::zeros_like(plain)));
      EXPECT_TRUE(whole(dtensor.new_ones({7})).equal(at::ones({7})));
      EXPECT_TRUE(whole(dtensor.new_full({7}, 2)).equal(at::full({7}, 2.0)));
      EXPECT_EQ(at::empty_like(dtensor).sizes(), plain.sizes());
      const auto like = DTensor(at::zeros_like(dtensor)).placements();
      const auto own = DTensor(dtensor).placements();
      EXPECT_EQ(like, own[0].is_partial() ? Placements{Replicate{}} : own);
    });
  });
}

TEST(Operators, RandomNumbersDoNotDependOnTheWorld) {
  on_worlds([](const DeviceMesh& mesh) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    auto same_seed = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto sharded = distribute_tensor(at::zeros({5, 3}), mesh, {Shard{0}});
    sharded.normal_(0, 1, generator);
    EXPECT_TRUE(whole(sharded).equal(at::zeros({5, 3}).normal_(0, 1, same_seed)));
  });
}

TEST(Operators, CopiesFromPlainTensorsTakeThisRanksPart) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(10, at::kFloat).view({5, 2});
    for (const Placement& placement :
         {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
      const auto target = distribute_tensor(at::zeros({5, 2}), mesh, {placement});
      target.copy_(plain);
      EXPECT_TRUE(whole(target).equal(plain));
      target.set_(plain.add(1));
      EXPECT_TRUE(whole(target).equal(plain.add(1)));
      EXPECT_EQ(target.placements(), Placements{placement});
      target.copy_(distribute_tensor(plain, mesh, {Shard{0}}));
      EXPECT_TRUE(whole(target).equal(plain));
      target.fill_(4);
      EXPECT_TRUE(whole(target).eq(4).all().item<bool>());
    }
  });
}

TEST(Operators, ForeachLists) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor a = at::arange(10, at::kFloat).view({5, 2});
    const at::Tensor b = at::arange(6, at::kFloat).view({2, 3}).add(1);
    const std::vector<at::Tensor> plain{a.clone(), b.clone()};
    const std::vector<at::Tensor> sharded{distribute_tensor(a, mesh, {Shard{0}}),
                                          distribute_tensor(b, mesh, {Shard{1}})};
    const auto steps = [](const std::vector<at::Tensor>& list) {
      at::_foreach_mul_(list, 2);
      at::_foreach_add_(list, list, 0.5);
      at::_foreach_lerp_(list, at::_foreach_neg(list), 0.25);
      at::_foreach_addcmul_(list, list, list, 0.125);
      at::_foreach_addcdiv_(list, list, at::_foreach_add(at::_foreach_abs(list), 1), 0.5);
      at::_foreach_div_(list, 3);
      at::_foreach_mul_(list, at::full({}, 0.5F));
      return at::_foreach_sqrt(at::_foreach_abs(list));
    };
    const auto expected = steps(plain);
    const auto actual = steps(sharded);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(whole(sharded[i]).equal(plain[i]));
      EXPECT_TRUE(whole(actual[i]).equal(expected[i]));
    }
    at::_foreach_copy_(sharded, expected);
    EXPECT_TRUE(whole(sharded[0]).equal(expected[0]));
    at::_foreach_zero_(sharded);
    EXPECT_TRUE(whole(sharded[1]).eq(0).all().item<bool>());
  });
}

TEST(Operators, Views) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(24, at::kFloat).view({6, 4});
    const at::Tensor sharded = distribute_tensor(plain, mesh, {Shard{0}});
    EXPECT_TRUE(whole(sharded.t()).equal(plain.t()));
    EXPECT_TRUE(whole(sharded.permute({1, 0})).equal(plain.permute({1, 0})));
    EXPECT_TRUE(whole(sharded.unsqueeze(0)).equal(plain.unsqueeze(0)));
    EXPECT_TRUE(whole(sharded.unsqueeze(0).squeeze(0)).equal(plain));
    EXPECT_TRUE(whole(sharded.select(1, 2)).equal(plain.select(1, 2)));
    EXPECT_TRUE(whole(sharded.narrow(1, 1, 2)).equal(plain.narrow(1, 1, 2)));
    EXPECT_TRUE(whole(sharded.view({-1})).equal(plain.view({-1})));
    EXPECT_TRUE(whole(sharded.view({6, 2, 2})).equal(plain.view({6, 2, 2})));
    EXPECT_TRUE(
        whole(sharded.unsqueeze(2).expand({6, 4, 3})).equal(plain.unsqueeze(2).expand({6, 4, 3})));
    EXPECT_TRUE(whole(sharded.t().contiguous()).equal(plain.t()));
    EXPECT_TRUE(sharded.t().contiguous().is_contiguous());
    sharded.view({-1}).zero_();
    EXPECT_TRUE(whole(sharded).eq(0).all().item<bool>());
  });
}

TEST(Operators, WorkInInferenceMode) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(10, at::kFloat).view({5, 2});
    const at::Tensor sharded = distribute_tensor(plain, mesh, {Shard{0}});
    c10::InferenceMode inference;
    EXPECT_TRUE(whole(sharded.mul(2).add(sharded)).equal(plain.mul(2).add(plain)));
    EXPECT_TRUE(whole(sharded.reshape({5, 2, 1})).equal(plain.reshape({5, 2, 1})));
    EXPECT_FLOAT_EQ(sharded.square().sum().item<float>(), plain.square().sum().item<float>());
  });
}

}  // namespace
}  // namespace fsdp
