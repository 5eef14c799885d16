// Losses and layers of images that run on parts: values and gradients are those of one
// device, and nothing moves.
#include "dtensor/dtensor.h"
#include "dtensor/internal/movement.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using testing::expect_as_plain;
using testing::on_worlds;
using testing::Problem;
using testing::waves;
using testing::whole;

struct OnOneTensor {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x)> function;
};

// Of every element of function(x) another share.
at::Tensor weighted_sum(const at::Tensor& result) {
  return result.mul(waves(result.sizes().vec(), 0.37)).sum();
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(actual.sizes() == expected.sizes() && actual.allclose(expected, 1e-12, 1e-12))
      << actual << expected;
}

void expect_on_parts(const OnOneTensor& test, const at::Tensor& values, const DeviceMesh& mesh,
                     const Placement& placement) {
  SCOPED_TRACE(test.name + " " + to_string(placement) + " of " + std::to_string(mesh.size()));
  const at::Tensor plain = values.detach().clone().set_requires_grad(true);
  const at::Tensor leaf = distribute_tensor(values, mesh, {placement}).set_requires_grad(true);
  std::string moved;
  const auto found = [&] {
    const internal::MovementListener listener(
        [&](const internal::Movement& movement) { moved += movement.operator_name + " "; });
    at::Tensor result = test.function(leaf);
    weighted_sum(result).backward();
    return result;
  }();
  const at::Tensor wanted = test.function(plain);
  weighted_sum(wanted).backward();
  EXPECT_EQ(moved, "");
  expect_close(whole(found), wanted);
  expect_close(whole(leaf.grad()), plain.grad());
}

// Of `values` cut so, on worlds of 1, 2 and 3.
void expect_on_parts(const std::vector<OnOneTensor>& tests, const at::Tensor& values,
                     const std::vector<Placement>& placements) {
  on_worlds([&](const DeviceMesh& mesh) {
    for (const auto& test : tests) {
      for (const Placement& placement : placements) expect_on_parts(test, values, mesh, placement);
    }
  });
}

constexpr at::Reduction::Reduction kReductions[] = {at::Reduction::None, at::Reduction::Mean,
                                                    at::Reduction::Sum};

// With a target of their own.
std::vector<OnOneTensor> elementwise_losses() {
  const auto target = [](const at::Tensor& x) { return x.detach().mul(0.5).cos(); };
  const auto likely = [=](const at::Tensor& x) { return target(x).sigmoid(); };
  std::vector<OnOneTensor> losses;
  for (const int64_t reduction : kReductions) {
    const auto add = [&](const std::string& name, const auto& loss) {
      losses.push_back({name + " " + std::to_string(reduction), loss});
    };
    add("mse", [=](const auto& x) { return at::mse_loss(x, target(x), reduction); });
    add("smooth l1",
        [=](const auto& x) { return at::smooth_l1_loss(x, target(x), reduction, 0.3); });
    add("huber", [=](const auto& x) { return at::huber_loss(x, target(x), reduction, 0.3); });
    add("soft margin",
        [=](const auto& x) { return at::soft_margin_loss(x, target(x).sign(), reduction); });
    for (const auto& weight : {at::Tensor(), waves({4}, 0.9).abs()}) {
      add("cross entropy", [=](const auto& x) {
        return at::binary_cross_entropy(x.sigmoid(), likely(x), weight, reduction);
      });
      add("cross entropy with logits", [=](const auto& x) {
        return at::binary_cross_entropy_with_logits(x, likely(x), weight, weight, reduction);
      });
    }
  }
  return losses;
}

TEST(OperatorsOnParts, LossesOfElements) {
  const std::vector<Placement> placements{Replicate{}, Shard{0}, Shard{1},
                                          Shard{.dim = 1, .outer = 2}};
  expect_on_parts(elementwise_losses(), waves({5, 4}), placements);
  expect_on_parts(elementwise_losses(), waves({1, 4}), placements);
}

TEST(OperatorsOnParts, LossesOfElementsInAnyPlacement) {
  for (const int64_t reduction : kReductions) {
    expect_as_plain([=] {
      return Problem{{waves({5, 4}), waves({5, 4}, 0.3)}, [=](const auto& t) {
                       return at::mse_loss(t[0], t[1], reduction)
                           .add(at::huber_loss(t[0], t[1], reduction, 0.3))
                           .mul(at::smooth_l1_loss(t[0], t[1], reduction, 0.2));
                     }};
    });
    expect_as_plain([=] {
      return Problem{{waves({5, 4}), waves({5, 4}, 0.3), waves({4}, 0.2)}, [=](const auto& t) {
                       const at::Tensor weight = t[2].detach().abs();
                       return at::binary_cross_entropy(t[0].sigmoid(), t[1].sigmoid(), weight,
                                                       reduction)
                           .add(at::binary_cross_entropy_with_logits(t[0], t[1].sigmoid(), {},
                                                                     weight, reduction));
                     }};
    });
  }
}

// Averages of many, of which the sum is beyond half precision.
TEST(OperatorsOnParts, AveragesInHalfPrecisionDoNotOverflow) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::full({300, 4}, 20.0, at::kHalf);
    const at::Tensor rows = distribute_tensor(plain, mesh, {Shard{0}});
    EXPECT_EQ(at::mse_loss(rows, at::zeros_like(rows)).item<double>(), 400);
  });
}

// On no rank, although the parts of one would fit each other.
TEST(OperatorsOnParts, ShapesThatDoNotFitAreRefusedOnEveryRank) {
  on_worlds([](const DeviceMesh& mesh) {
    for (const int64_t rows : {2, 3}) {
      const at::Tensor a = distribute_tensor(waves({5, 4}), mesh, {Shard{0}});
      const at::Tensor b = distribute_tensor(waves({rows, 4}), mesh, {Shard{0}});
      EXPECT_THROW(a.add(b), c10::Error);
      EXPECT_THROW(at::mse_loss(a, b), c10::Error);
      EXPECT_THROW(at::binary_cross_entropy(a, b), c10::Error);
      EXPECT_THROW(at::binary_cross_entropy(a, waves({1, 4}).abs()), c10::Error);
    }
  });
}

}  // namespace
}  // namespace fsdp
