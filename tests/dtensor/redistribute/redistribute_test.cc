#include "dtensor/redistribute/redistribute.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/dtensor/partial_values.h"
#include "tests/dtensor/redistribute/random_transitions.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp {
namespace {

using testing::every_placement;
using testing::known_dtensor;
using testing::run_ranks;
using Placements = std::vector<Placement>;

bool has_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(),
                     [](const auto& p) { return p.is_partial(); });
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, /*rtol=*/1e-6, /*atol=*/1e-6);
}

void expect_transition(const DeviceMesh& mesh, const testing::Transition& transition) {
  const auto [dtensor, whole] =
      known_dtensor(mesh, transition.from, transition.shape, transition.value_seed);
  const DTensor moved = dtensor.redistribute(transition.to);
  const auto& spec = internal::spec_of(moved);
  EXPECT_EQ(moved.placements(), spec.with_placements(transition.to).simplified().placements());
  if (!has_partial(transition.to)) {
    const at::Tensor part = internal::local_part(whole, spec);
    EXPECT_TRUE(same(moved.to_local(), part)) << to_string(transition, mesh);
  }
  EXPECT_TRUE(same(moved.full_tensor(), whole)) << to_string(transition, mesh);
}

TEST(Redistribute, EveryTransitionOnOneDimension) {
  for (int64_t world = 1; world <= 4; ++world) {
    run_ranks(world, [world](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      for (int64_t size : {0, 1, 2, 3, 5, 7, 9}) {
        for (const auto& from : every_placement(2)) {
          for (const auto& to : every_placement(2)) {
            expect_transition(mesh, {{from}, {to}, {size, 3}, static_cast<uint64_t>(size)});
            expect_transition(mesh, {{from}, {to}, {2, size}, static_cast<uint64_t>(size)});
          }
        }
      }
    });
  }
}

// Blocks of two, parts of stated sizes that begin or end with none, and owners, along
// dimensions of 12 and 6.
Placements cuts_over(int64_t world) {
  const std::vector<std::vector<int64_t>> sixths = {{6}, {5, 1}, {1, 0, 5}, {0, 2, 3, 1}};
  const std::vector<std::vector<int64_t>> thirds = {{3}, {0, 3}, {2, 1, 0}, {1, 1, 0, 1}};
  const auto place = static_cast<size_t>(world) - 1;
  Placements cuts;
  for (int64_t dim = 0; dim < 2; ++dim) {
    cuts.emplace_back(Shard{.dim = dim, .unit = 2});
    cuts.emplace_back(RaggedShard{.dim = dim, .local_units = sixths[place]});
    cuts.emplace_back(RaggedShard{.dim = dim, .local_units = thirds[place]});
    for (const int64_t owner : {int64_t{0}, world - 1})
      cuts.push_back(Placement(Owned{owner}).along(dim));
  }
  return cuts;
}

TEST(Redistribute, EveryTransitionBetweenAllKindsOfCuts) {
  for (int64_t world = 1; world <= 4; ++world) {
    run_ranks(world, [world](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      auto all = every_placement(2);
      const auto cuts = cuts_over(world);
      all.insert(all.end(), cuts.begin(), cuts.end());
      for (const auto& from : all) {
        for (const auto& to : all) expect_transition(mesh, {{from}, {to}, {12, 6}, 5});
      }
    });
  }
}

void every_transition_on_two_by_two(const std::vector<int64_t>& shape) {
  run_ranks(4, [&shape](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"a", "b"});
    std::vector<Placements> all;
    for (const auto& outer : every_placement(2)) {
      for (const auto& inner : every_placement(2)) {
        if (testing::commute({outer, inner})) all.push_back({outer, inner});
      }
    }
    for (const auto& from : all) {
      for (const auto& to : all) expect_transition(mesh, {from, to, shape, 11});
    }
  });
}

TEST(Redistribute, EveryTransitionOnTwoByTwoUneven) { every_transition_on_two_by_two({5, 3}); }
TEST(Redistribute, EveryTransitionOnTwoByTwoEven) { every_transition_on_two_by_two({4, 6}); }

void random_cases(const std::vector<int64_t>& mesh_shape, int count, unsigned seed) {
  testing::on_random_transitions(mesh_shape, count, seed,
                                 [](const DeviceMesh& mesh, const testing::Transition& transition) {
                                   expect_transition(mesh, transition);
                                 });
}

TEST(Redistribute, TwoThousandRandomCases) {
  random_cases({2}, 400, 1);
  random_cases({3}, 400, 2);
  random_cases({4}, 300, 3);
  random_cases({2, 2}, 500, 4);
  random_cases({2, 3}, 300, 5);
  random_cases({2, 2, 2}, 100, 6);
}

TEST(Redistribute, GradientsComeBackToTheSource) {
  run_ranks(3, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto known = known_dtensor(mesh, {Shard{0}}, {5, 2}, 3);
    const at::Tensor leaf = known.dtensor.detach().set_requires_grad(true);
    const at::Tensor whole = known.whole.clone().set_requires_grad(true);
    DTensor(leaf).full_tensor().pow(2).sum().backward();
    whole.pow(2).sum().backward();
    ASSERT_TRUE(is_dtensor(leaf.grad()));
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Shard{0}});
    EXPECT_TRUE(DTensor(leaf.grad()).full_tensor().equal(whole.grad()));
  });
}

TEST(Redistribute, GradientsPassBetweenLocalAndDistributed) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor local =
        at::full({2, 2}, static_cast<double>(rank + 1)).set_requires_grad(true);
    const DTensor dtensor = from_local(local, mesh, {Shard{0}});
    EXPECT_EQ(dtensor.sizes(), at::IntArrayRef({4, 2}));
    dtensor.to_local().mul(3).sum().backward();
    EXPECT_TRUE(local.grad().equal(at::full({2, 2}, 3.0)));
    EXPECT_EQ(local.data_ptr(), from_local(local, mesh, {Shard{0}}).to_local().data_ptr());
  });
}

}  // namespace
}  // namespace fsdp
