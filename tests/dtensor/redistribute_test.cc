#include "dtensor/redistribute.h"

#include "dtensor/dtensor.h"
#include "dtensor/dtensor_impl.h"
#include "tests/dtensor/partial_values.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>

namespace fsdp {
namespace {

using testing::every_placement;
using testing::known_dtensor;
using testing::run_ranks;
using Placements = std::vector<Placement>;

bool has_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const auto& p) { return p.is_partial(); });
}

// Whether two Partials may stand in one list.
bool commute(const Placements& placements) {
  const auto linear = [](Partial::Op op) { return op == Partial::Op::kSum || op == Partial::Op::kAvg; };
  for (const auto& a : placements) {
    for (const auto& b : placements) {
      if (!a.is_partial() || !b.is_partial() || a == b) continue;
      if (!linear(a.partial_op()) || !linear(b.partial_op())) return false;
    }
  }
  return true;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, /*rtol=*/1e-6, /*atol=*/1e-6);
}

std::string text(const Placements& from, const Placements& to, at::IntArrayRef shape, const DeviceMesh& mesh) {
  std::ostringstream out;
  out << at::IntArrayRef(shape) << " on " << mesh << ":";
  for (const auto& placement : from) out << " " << placement;
  out << " ->";
  for (const auto& placement : to) out << " " << placement;
  return out.str();
}

void expect_transition(const DeviceMesh& mesh, const Placements& from, const Placements& to,
                       const std::vector<int64_t>& shape, uint64_t seed) {
  const auto [dtensor, whole] = known_dtensor(mesh, from, shape, seed);
  const DTensor moved = dtensor.redistribute(to);
  EXPECT_EQ(moved.placements(), to);
  if (!has_partial(to)) {
    const at::Tensor part = internal::local_part(whole, *internal::spec_of(moved));
    EXPECT_TRUE(same(moved.to_local(), part)) << text(from, to, shape, mesh);
  }
  EXPECT_TRUE(same(moved.full_tensor(), whole)) << text(from, to, shape, mesh);
}

TEST(Redistribute, EveryTransitionOnOneDimension) {
  for (int64_t world = 1; world <= 4; ++world) {
    run_ranks(world, [world](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      for (int64_t size : {0, 1, 2, 3, 5, 7, 9}) {
        for (const auto& from : every_placement(2)) {
          for (const auto& to : every_placement(2)) {
            expect_transition(mesh, {from}, {to}, {size, 3}, static_cast<uint64_t>(size));
            expect_transition(mesh, {from}, {to}, {2, size}, static_cast<uint64_t>(size));
          }
        }
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
        if (commute({outer, inner})) all.push_back({outer, inner});
      }
    }
    for (const auto& from : all) {
      for (const auto& to : all) expect_transition(mesh, from, to, shape, 11);
    }
  });
}

TEST(Redistribute, EveryTransitionOnTwoByTwoUneven) { every_transition_on_two_by_two({5, 3}); }
TEST(Redistribute, EveryTransitionOnTwoByTwoEven) { every_transition_on_two_by_two({4, 6}); }

Placements random_placements(std::mt19937& random, int64_t mesh_ndim, int64_t ndim) {
  const auto choices = every_placement(ndim);
  for (;;) {
    Placements placements;
    for (int64_t m = 0; m < mesh_ndim; ++m) placements.push_back(choices[random() % choices.size()]);
    if (commute(placements)) return placements;
  }
}

void random_cases(const std::vector<int64_t>& mesh_shape, int count, unsigned seed) {
  int64_t world = 1;
  for (int64_t size : mesh_shape) world *= size;
  run_ranks(world, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, mesh_shape);
    std::mt19937 random(seed);
    for (int i = 0; i < count; ++i) {
      std::vector<int64_t> shape(1 + random() % 3);
      for (auto& size : shape) size = static_cast<int64_t>(random() % 10);
      const auto ndim = static_cast<int64_t>(shape.size());
      const auto from = random_placements(random, mesh.ndim(), ndim);
      const auto to = random_placements(random, mesh.ndim(), ndim);
      expect_transition(mesh, from, to, shape, random());
    }
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
    const at::Tensor local = at::full({2, 2}, static_cast<double>(rank + 1)).set_requires_grad(true);
    const DTensor dtensor = from_local(local, mesh, {Shard{0}});
    EXPECT_EQ(dtensor.sizes(), at::IntArrayRef({4, 2}));
    dtensor.to_local().mul(3).sum().backward();
    EXPECT_TRUE(local.grad().equal(at::full({2, 2}, 3.0)));
    EXPECT_EQ(local.data_ptr(), from_local(local, mesh, {Shard{0}}).to_local().data_ptr());
  });
}

}  // namespace
}  // namespace fsdp
