// What autograd can do with parameters works with parameters that are empty between
// operators: custom functions, higher derivatives, hooks, modes. Every parameter is a
// unit, emptied and poisoned after every operator.
#include "tests/fully_shard/support/bit_equality.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace fsdp::testing {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Matrix product, its operands kept by save_for_backward.
struct SavedProduct : torch::autograd::Function<SavedProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

// The same, kept in saved_data.
struct DataProduct : torch::autograd::Function<DataProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->saved_data["x"] = x;
    context->saved_data["w"] = w;
    return x.mm(w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0].mm(context->saved_data["w"].toTensor().t()),
            context->saved_data["x"].toTensor().t().mm(gradients[0])};
  }
};

Tensor two_layers(const Tensor& x, const Tensor& w) {
  return torch::linear(torch::linear(x, w).tanh(), w);
}

// Activation checkpointing with a backward inside the backward; `w` gets its gradient
// there.
struct ReentrantCheckpoint : torch::autograd::Function<ReentrantCheckpoint> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x});
    context->saved_data["w"] = w;
    torch::NoGradGuard no_grad;
    return two_layers(x, w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    torch::AutoGradMode grad(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({two_layers(x, context->saved_data["w"].toTensor())}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

Tensors autocast_program(const Tensors& w, Random& random) {
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  at::autocast::set_autocast_cache_enabled(true);
  const auto y = torch::linear(torch::linear(random({4, 16}), w[0], w[1]), w[0], w[1]);
  const auto z = torch::conv2d(random({1, 3, 8, 8}), w[2]);
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  auto loss = y.to(torch::kFloat).pow(2).sum() + z.to(torch::kFloat).sum();
  loss.backward();
  return {y, loss};
}

std::vector<Case> autograd_cases() {
  return {
      {"function with save_for_backward", shapes({{4, 5}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4}).requires_grad_();
         auto loss = SavedProduct::apply(x, w[0]).pow(2).sum();
         loss.backward();
         return {loss, x.grad()};
       }},
      {"function with saved_data", shapes({{4, 5}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4}).requires_grad_();
         auto loss = DataProduct::apply(x, w[0]).pow(2).sum();
         loss.backward();
         return {loss, x.grad()};
       }},
      {"autograd grad", shapes({{4, 5}, {5}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto loss = torch::addmm(w[1], random({3, 4}), w[0]).pow(2).sum();
         return torch::autograd::grad({loss}, {w[0], w[1]});
       }},
      {"double backward", shapes({{4, 4}, {4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4}).requires_grad_();
         const auto loss =
             torch::linear(torch::linear(x, w[0], w[1]).tanh(), w[0], w[1]).pow(2).sum();
         const auto gradients =
             torch::autograd::grad({loss}, {x, w[0]}, {}, true, /*create_graph=*/true);
         (gradients[0].pow(2).sum() + gradients[1].pow(3).sum()).backward();
         return {gradients[0], gradients[1], x.grad()};
       }},
      {"retain_graph twice", shapes({{4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4}).requires_grad_();
         const auto loss = x.mm(w[0]).tanh().mm(w[0]).sum();
         loss.backward({}, /*retain_graph=*/true);
         loss.backward({}, /*retain_graph=*/true);
         loss.backward();
         return {x.grad()};
       }},
      {"reentrant checkpoint", shapes({{4, 4}, {4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4}).requires_grad_();
         auto y = ReentrantCheckpoint::apply(x.mm(w[1]), w[0]);
         y = ReentrantCheckpoint::apply(y, w[1]).mm(w[0]);
         y.pow(2).sum().backward();
         return {x.grad()};
       }},
      {"inference mode", shapes({{4, 4}, {4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         c10::InferenceMode inference;
         const auto transposed = w[0].t();
         const auto x = random({3, 4});
         Tensors results{torch::linear(x, w[0], w[1]), x.mm(transposed), w[0].narrow(0, 1, 2)};
         for (auto& result : results) result = result.clone();
         return results;
       }},
      {"grad mode switched inside no_grad", shapes({{4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const auto y = torch::linear(random({3, 4}), w[0]);
         torch::AutoGradMode grad(true);
         torch::linear(y, w[0]).sum().backward();
         return {y};
       }},
      {"dispatch below autograd", shapes({{4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         at::AutoDispatchBelowADInplaceOrView below;
         const auto transposed = w[0].t();
         return {torch::linear(random({3, 4}), w[0]), random({3, 4}).mm(transposed)};
       }},
      {"hooks of parameters", shapes({{4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto weight = w[0];
         const auto handle =
             weight.register_hook([weight](const Tensor& g) { return g * 2 + weight.detach(); });
         const auto y = torch::linear(random({3, 4}), weight);
         y.register_hook([](const Tensor& g) { return g * 3; });
         (y.pow(2).sum() + weight.pow(3).sum()).backward();
         weight.remove_hook(handle);
         return {y};
       }},
      {"accumulation over three backwards", shapes({{4, 4}, {4, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({3, 4});
         for (int i = 0; i < 3; ++i) {
           (torch::linear(x, w[0]).pow(2).sum() + w[0].sum() + (w[0] * w[1]).sum()).backward();
         }
         return {};
       }},
      {"backward from a parameter", shapes({{4, 4}, {4, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         w[0].backward(w[1].detach());
         w[0].view_as(w[0]).backward(w[1].detach());
         return {};
       }},
      {"a gradient that aliases another parameter", shapes({{4, 4}, {4, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         torch::autograd::backward({w[0] * 1}, {w[1].detach()});
         torch::NoGradGuard no_grad;
         w[1].add_(1);
         return {w[1]};
       }},
      {"in-place operators in the graph", shapes({{6, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         auto product = w[0] * 1;
         product.narrow(0, 0, 2).mul_(2);
         auto copy = w[0].clone();
         copy.t().mul_(w[0].t());
         auto loss = product.pow(2).sum() + copy.sum();
         loss.backward();
         return {loss};
       }},
      {"autocast with its weight cache", shapes({{16, 16}, {16}, {4, 3, 3, 3}}), autocast_program},
  };
}

class InterceptionAutograd : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { at::autocast::clear_cache(); }  // shared by all threads
};

TEST_P(InterceptionAutograd, HasTheUnshardedBits) {
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(GetParam(), world);
}

INSTANTIATE_TEST_SUITE_P(Cases, InterceptionAutograd, ::testing::ValuesIn(autograd_cases()),
                         [](const auto& info) { return test_name(info.param.name); });

// Modes of the process, switched on before the ranks start.

TEST(InterceptionModes, AnomalyModeHasTheUnshardedBits) {
  torch::autograd::DetectAnomalyGuard anomaly(/*check_nan=*/true);
  const Case c{"anomaly", shapes({{4, 4}}), [](const Tensors& w, Random& random) -> Tensors {
                 const auto x = random({3, 4}).requires_grad_();
                 torch::linear(x, w[0]).pow(2).sum().backward();
                 return {x.grad()};
               }};
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(c, world);
}

TEST(InterceptionModes, DeterministicAlgorithmsHaveTheUnshardedBits) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  const Case c{"deterministic", shapes({{6, 4}}), [](const Tensors& w, Random& random) -> Tensors {
                 auto loss = w[0].index({torch::tensor({1, 1, 2})}).pow(2).sum() +
                             w[0].index_select(0, torch::tensor({1, 1})).sum() +
                             torch::linear(random({2, 4}), w[0]).sum() +
                             w[0].gather(0, torch::zeros({2, 4}, torch::kLong)).sum();
                 loss.backward();
                 return {loss};
               }};
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(c, world);
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST(InterceptionModes, ForwardDerivativesHaveTheUnshardedBits) {
  const auto level = torch::autograd::forward_ad::enter_dual_level();
  const Case c{"forward", shapes({{4, 4}}), [level](const Tensors& w, Random& random) -> Tensors {
                 const auto level_index = static_cast<int64_t>(level);
                 const auto primal = at::_make_dual(w[0], random({4, 4}), level_index);
                 const auto y = torch::linear(random({3, 4}), primal).tanh();
                 const auto [value, tangent] = at::_unpack_dual(y, level_index);
                 const auto dual = at::_make_dual(random({4, 4}), w[0].detach(), level_index);
                 return {value, tangent, std::get<1>(at::_unpack_dual(dual.sin(), level_index))};
               }};
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(c, world);
  torch::autograd::forward_ad::exit_dual_level(level);
}

}  // namespace
}  // namespace fsdp::testing
