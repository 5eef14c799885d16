#include "tests/dtensor/random_placements.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_cuts.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace fsdp::testing {
namespace {

using Placements = std::vector<Placement>;
using Tensors = std::vector<at::Tensor>;

// The sum of the result, weighted so that every element counts differently.
at::Tensor loss_of(const at::Tensor& result) {
  const at::Tensor weights = at::arange(result.numel(), at::kDouble).mul(0.37).sin();
  return whole(result).mul(weights.view(result.sizes()).to(result.dtype())).sum();
}

struct Outcome {
  at::Tensor value;
  Tensors gradients;
};

Outcome outcome(const std::function<at::Tensor(const Tensors&)>& function, const Tensors& inputs) {
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
      const Placements list = with_random_cuts(lists[random() % lists.size()], plain.sizes().vec(),
                                               mesh.shape(), random);
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
    try {
      expect_same_outcome(problem, expected, inputs);
    } catch (const c10::Error& error) {
      ADD_FAILURE() << error.what_without_backtrace();
    }
  }
}

}  // namespace

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

at::Tensor waves(const std::vector<int64_t>& shape, double step) {
  return at::arange(c10::multiply_integers(shape), at::kDouble).mul(step).sin().view(shape);
}

void expect_as_plain(const std::function<Problem()>& problem, int count) {
  on_meshes([&](const DeviceMesh& mesh) { try_placements(mesh, problem(), count); });
}

}  // namespace fsdp::testing
