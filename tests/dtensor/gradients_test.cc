// Gradients through operators.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace fsdp {
namespace {

using testing::on_worlds;
using testing::whole;
using Placements = std::vector<Placement>;

at::Tensor weights(const std::vector<int64_t>& shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).mul(0.37).sin().view(shape);
}

struct LossCase {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> loss;
};

// Gradients of losses of {5, 4} tensors, cut along dimension 0 or replicated, beside the
// plain ones.
void expect_same_gradients(const std::vector<LossCase>& cases) {
  testing::on_meshes([&](const DeviceMesh& mesh) {
    Placements rows(static_cast<size_t>(mesh.ndim()), Replicate{});
    const Placements replicated = rows;
    rows[0] = Shard{0};
    for (const Placements& placements : {rows, replicated}) {
      for (const auto& test : cases) {
        SCOPED_TRACE(std::string(test.name) + " " + to_string(mesh) + " " +
                     to_string(placements[0]));
        const at::Tensor plain = weights({5, 4}).set_requires_grad(true);
        const at::Tensor leaf =
            distribute_tensor(plain.detach(), mesh, placements).set_requires_grad(true);
        const at::Tensor loss = test.loss(leaf);
        const at::Tensor expected = test.loss(plain);
        EXPECT_NEAR(whole(loss).item<double>(), expected.item<double>(), 1e-5);
        loss.backward();
        expected.backward();
        EXPECT_TRUE(whole(leaf.grad()).allclose(plain.grad(), 1e-5, 1e-6));
      }
    }
  });
}

TEST(OperatorGradients, AreThoseOfPlainTensors) {
  const at::Tensor columns = at::tensor({3, 0, 0}, at::kLong);
  expect_same_gradients({
      {"square", [](const auto& t) { return t.square().sum(); }},
      {"sum", [](const auto& t) { return t.sum(); }},
      {"mean", [](const auto& t) { return t.mul(t.exp()).mean(); }},
      {"norm", [](const auto& t) { return t.norm(); }},
      {"norm of rows", [](const auto& t) { return at::linalg_vector_norm(t, 2, 1).sum(); }},
      {"variance", [](const auto& t) { return t.var(); }},
      {"variance of columns", [](const auto& t) { return t.std(0).sum(); }},
      {"broadcast", [](const auto& t) { return t.div(t.abs().add(1).sum(0)).sum(); }},
      {"where", [](const auto& t) { return at::where(t > 0, t.square(), t.neg()).sum(); }},
      {"clamp", [](const auto& t) { return t.clamp(-0.5, 0.5).mul(t).sum(); }},
      {"lerp", [](const auto& t) { return t.lerp(t.square(), 0.3).sum(); }},
      {"softmax", [](const auto& t) { return t.softmax(1).square().sum(); }},
      {"log_softmax", [](const auto& t) { return t.log_softmax(1).select(1, 0).mean(); }},
      {"logsumexp", [](const auto& t) { return t.logsumexp(1).sum(); }},
      {"cumsum", [](const auto& t) { return t.cumsum(1).square().sum(); }},
      {"select", [](const auto& t) { return t.select(1, 2).square().sum(); }},
      {"slice", [](const auto& t) { return t.narrow(1, 1, 2).square().sum(); }},
      {"index_select",
       [columns](const auto& t) { return t.index_select(1, columns).square().sum(); }},
      {"split",
       [](const auto& t) {
         const auto parts = t.split(3, 1);
         return parts[0].square().sum().add(parts[1].exp().sum());
       }},
      {"split with an unused part", [](const auto& t) { return t.split(3, 1)[0].square().sum(); }},
      {"split with unused sizes",
       [](const auto& t) {
         return t.split_with_sizes({1, 2, 1}, 1)[1].exp().sum();
       }},
      {"chunk with an unused part", [](const auto& t) { return t.chunk(2, 1)[1].square().mean(); }},
      {"unbind with unused columns",
       [](const auto& t) { return t.unbind(1)[2].mul(t.select(1, 0)).sum(); }},
      {"maxima of rows", [](const auto& t) { return std::get<0>(t.max(1)).square().sum(); }},
      {"minima of rows", [](const auto& t) { return std::get<0>(t.min(1, true)).mul(t).sum(); }},
      {"median of rows", [](const auto& t) { return std::get<0>(t.median(1)).square().sum(); }},
      {"second smallest of rows",
       [](const auto& t) { return std::get<0>(t.kthvalue(2, 1)).exp().sum(); }},
      {"topk", [](const auto& t) { return std::get<0>(t.topk(2, 1)).square().sum(); }},
      {"sort", [](const auto& t) { return std::get<0>(t.sort(1)).select(1, 1).square().sum(); }},
      {"cummax", [](const auto& t) { return std::get<0>(t.cummax(1)).square().sum(); }},
      {"gather",
       [](const auto& t) {
         return t.gather(1, at::tensor({3, 0, 0}).expand({5, 3})).square().sum();
       }},
      {"scatter",
       [](const auto& t) {
         return t.scatter(1, at::tensor({3, 0}).expand({5, 2}), t.narrow(1, 1, 2).exp())
             .square()
             .sum();
       }},
      {"scatter_add",
       [](const auto& t) {
         return t.scatter_add(1, at::tensor({3, 3}).expand({5, 2}), t.narrow(1, 1, 2))
             .square()
             .sum();
       }},
      {"cat",
       [](const auto& t) {
         return at::cat({t, t.square()}, 1).cumsum(1).sum();
       }},
      {"stack",
       [](const auto& t) {
         return at::stack({t, t.square()}).square().sum();
       }},
      {"reshape",
       [](const auto& t) {
         return t.reshape({5, 2, 2}).permute({1, 0, 2}).select(0, 1).square().sum();
       }},
      {"to double", [](const auto& t) { return t.to(at::kDouble).square().sum().to(at::kFloat); }},
      {"flip", [](const auto& t) { return t.flip(1).mul(t).sum(); }},
      {"dot", [](const auto& t) { return at::dot(t.select(1, 0), t.select(1, 1).exp()); }},
  });
}

// The scatter of a gradient is differentiable itself.
TEST(OperatorGradients, OfSelectionsHaveGradients) {
  const auto second_derivative = [](const at::Tensor& t) {
    const at::Tensor loss =
        std::get<0>(t.topk(2, 1)).pow(3).sum().add(t.split(3, 1)[0].pow(4).sum());
    const at::Tensor first =
        torch::autograd::grad({loss}, {t}, {}, std::nullopt, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.mul(t).sum()}, {t})[0];
  };
  on_worlds([&](const DeviceMesh& mesh) {
    const at::Tensor plain = weights({5, 4}).set_requires_grad(true);
    const at::Tensor leaf =
        distribute_tensor(plain.detach(), mesh, {Shard{0}}).set_requires_grad(true);
    EXPECT_TRUE(whole(second_derivative(leaf)).allclose(second_derivative(plain), 1e-5, 1e-6));
  });
}

// As in PyTorch: sum's formula expands the loss's gradient, which is replicated.
TEST(OperatorGradients, LieAsTheirFormulaMadeThem) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor leaf =
        distribute_tensor(weights({5, 4}), mesh, {Shard{0}}).set_requires_grad(true);
    leaf.sum().backward();
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Replicate{}});
    leaf.mutable_grad().reset();
    leaf.square().sum().backward();
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Shard{0}});
  });
}

}  // namespace
}  // namespace fsdp
