// Gradients through redistribution, and through the edges to plain tensors.
#include "dtensor/redistribute/differentiable.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/partial_values.h"
#include "tests/dtensor/redistribute/random_transitions.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::known_dtensor;
using testing::on_worlds;
using testing::run_ranks;
using testing::whole;
using Placements = std::vector<Placement>;

at::Tensor weights(const std::vector<int64_t>& shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).mul(0.37).sin().view(shape);
}

// value -> redistribute -> sum(value * weights): the gradient is the weights, whole where
// the source was Partial.
void expect_gradient_of_value(const DeviceMesh& mesh, const Placements& from, const Placements& to,
                              const std::vector<int64_t>& shape) {
  const at::Tensor leaf =
      known_dtensor(mesh, from, shape, 3).dtensor.detach().set_requires_grad(true);
  const at::Tensor w = weights(shape);
  DTensor(leaf).redistribute(to).full_tensor().mul(w).sum().backward();
  ASSERT_TRUE(is_dtensor(leaf.grad()));
  EXPECT_EQ(DTensor(leaf.grad()).placements(),
            internal::without_partials(DTensor(leaf).placements()));
  EXPECT_TRUE(whole(leaf.grad()).equal(w));
}

// The same from what each rank holds: a term of a sum counts fully, a term of an average
// for its part.
void expect_gradient_of_terms(const DeviceMesh& mesh, const Placements& from, const Placements& to,
                              const std::vector<int64_t>& shape) {
  const at::Tensor local =
      known_dtensor(mesh, from, shape, 3).dtensor.to_local().clone().set_requires_grad(true);
  const auto distribute = [&] { return from_local(local, mesh, from, {.shape = shape}); };
  bool has_gradient = true;
  double share = 1;
  for (size_t m = 0; m < from.size(); ++m) {
    const int64_t size = mesh.size(static_cast<int64_t>(m));
    has_gradient = has_gradient && (testing::is_linear(from[m]) || size == 1);
    if (from[m] == Placement(Partial{Partial::Op::kAvg})) share /= static_cast<double>(size);
  }
  if (!has_gradient) {
    EXPECT_THAT(error_of(distribute), HasSubstr("have no gradient rule"));
    return;
  }
  const at::Tensor w = weights(shape);
  distribute().redistribute(to).full_tensor().mul(w).sum().backward();
  const internal::DTensorSpec spec{mesh, internal::without_partials(from), shape,
                                   w.strides().vec()};
  EXPECT_TRUE(local.grad().allclose(internal::local_part(w, spec).mul(share)));
}

void random_transitions(const std::vector<int64_t>& mesh_shape, int count, unsigned seed) {
  testing::on_random_transitions(
      mesh_shape, count, seed, [](const DeviceMesh& mesh, const auto& transition) {
        expect_gradient_of_value(mesh, transition.from, transition.to, transition.shape);
        expect_gradient_of_terms(mesh, transition.from, transition.to, transition.shape);
      });
}

TEST(RedistributeGradients, OneDimension) {
  random_transitions({1}, 50, 1);
  random_transitions({2}, 100, 2);
  random_transitions({3}, 100, 3);
}

TEST(RedistributeGradients, TwoDimensions) { random_transitions({2, 2}, 150, 4); }

TEST(RedistributeGradients, ThreeDimensions) {
  random_transitions({2, 1, 2}, 150, 5);
  random_transitions({2, 2, 1}, 150, 6);
}

// The loss of all ranks is the sum of what each computes from its own part.
TEST(RedistributeGradients, LocalPartsAddUp) {
  for (int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      for (const Placement& from : {Placement(Shard{0}), Placement(Shard{1}),
                                    Placement(Replicate{}), Placement(Partial{})}) {
        for (const Placement& to : {Placement(Shard{0}), Placement(Shard{1})}) {
          const at::Tensor leaf =
              known_dtensor(mesh, {from}, {5, 4}, 3).dtensor.detach().set_requires_grad(true);
          const DTensor moved = DTensor(leaf).redistribute({to});
          const at::Tensor w = weights({5, 4});
          moved.to_local().mul(internal::local_part(w, internal::spec_of(moved))).sum().backward();
          EXPECT_TRUE(whole(leaf.grad()).equal(w)) << from << " to " << to;
        }
      }
    });
  }
}

TEST(RedistributeGradients, SecondDerivatives) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = weights({5, 4});
    const at::Tensor leaf = distribute_tensor(plain, mesh, {Shard{0}}).set_requires_grad(true);
    const at::Tensor loss = DTensor(leaf).redistribute({Shard{1}}).full_tensor().pow(3).sum();
    const at::Tensor grad =
        torch::autograd::grad({loss}, {leaf}, {}, std::nullopt, /*create_graph=*/true)[0];
    ASSERT_TRUE(grad.requires_grad());
    const at::Tensor second = torch::autograd::grad({DTensor(grad).full_tensor().sum()}, {leaf})[0];
    EXPECT_TRUE(whole(second).allclose(plain.mul(6)));
    const at::Tensor local =
        DTensor(distribute_tensor(plain, mesh, {Shard{0}})).to_local().set_requires_grad(true);
    const at::Tensor sum =
        from_local(local, mesh, {Shard{0}}, {.shape = std::vector<int64_t>{5, 4}})
            .full_tensor()
            .pow(3)
            .sum();
    const at::Tensor first =
        torch::autograd::grad({sum}, {local}, {}, std::nullopt, /*create_graph=*/true)[0];
    EXPECT_TRUE(torch::autograd::grad({first.sum()}, {local})[0].allclose(local.mul(6)));
  });
}

}  // namespace
}  // namespace fsdp
