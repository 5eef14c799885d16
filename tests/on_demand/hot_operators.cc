#include "tests/on_demand/hot_operators.h"

#include <ATen/ATen.h>

namespace fsdp::testing {
namespace {

using c10::IValue;
using Parameters = std::vector<at::Tensor>;
using Shape = std::vector<int64_t>;

// The call of an operator on its parameters alone.
HotOperator on_parameter(std::string name, std::string overload, std::vector<IValue> rest) {
  return {"aten::" + name,
          std::move(overload),
          {{6, 4}},
          [rest = std::move(rest)](const at::Tensor&, const Parameters& p) {
            torch::jit::Stack stack{p[0]};
            stack.insert(stack.end(), rest.begin(), rest.end());
            return stack;
          },
          {1}};
}

}  // namespace

std::vector<HotOperator> touching_operators() {
  using X = const at::Tensor&;
  using P = const Parameters&;
  const IValue none;
  const auto pair = [](int64_t a) { return IValue(c10::List<int64_t>({a, a})); };
  const auto mask = [](bool a, bool b, bool c) { return IValue(c10::List<bool>({a, b, c})); };
  return {
      {"aten::linear",
       "",
       {{4, 6}, {4}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0], p[1]};
       },
       {3, 6}},
      {"aten::linear",
       "",
       {{4, 6}},
       [=](X x, P p) {
         return torch::jit::Stack{x, p[0], none};
       },
       {3, 6}},
      {"aten::linear",
       "",
       {{4, 6}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0], at::Tensor()};
       },
       {3, 6}},
      {"aten::matmul",
       "",
       {{6, 4}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0]};
       },
       {2, 3, 6}},
      {"aten::mm",
       "",
       {{6, 4}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0]};
       },
       {3, 6}},
      {"aten::addmm",
       "",
       {{4}, {6, 4}},
       [](X x, P p) {
         return torch::jit::Stack{p[0], x, p[1], 1, 2};
       },
       {3, 6}},
      {"aten::bmm",
       "",
       {{2, 6, 4}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0]};
       },
       {2, 3, 6}},
      {"aten::mul",
       "Tensor",
       {{6}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0]};
       },
       {3, 6}},
      {"aten::add",
       "Tensor",
       {{6}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0], 3};
       },
       {3, 6}},
      {"aten::add",
       "Tensor",
       {{6}, {6}},
       [](X, P p) {
         return torch::jit::Stack{p[0], p[1], 3};
       },
       {1}},
      {"aten::embedding",
       "",
       {{6, 4}},
       [](X, P p) {
         return torch::jit::Stack{p[0], at::tensor({1, 5, 1}), -1, false, false};
       },
       {1}},
      {"aten::scaled_dot_product_attention",
       "",
       {{1, 2, 3, 4}, {1, 2, 3, 4}},
       [=](X x, P p) { return torch::jit::Stack{x, p[0], p[1], none, 0.0, false, none, false}; },
       {1, 2, 3, 4}},
      {"aten::layer_norm",
       "",
       {{4}, {4}},
       [](X x, P p) {
         return torch::jit::Stack{x, c10::List<int64_t>({4}), p[0], p[1], 1e-5, true};
       },
       {3, 4}},
      {"aten::layer_norm",
       "",
       {{4}},
       [=](X x, P p) {
         return torch::jit::Stack{x, c10::List<int64_t>({4}), p[0], none, 1e-5, true};
       },
       {3, 4}},
      {"aten::rms_norm",
       "",
       {{4}},
       [=](X x, P p) {
         return torch::jit::Stack{x, c10::List<int64_t>({4}), p[0], none};
       },
       {3, 4}},
      {"aten::group_norm",
       "",
       {{4}, {4}},
       [](X x, P p) { return torch::jit::Stack{x, 2, p[0], p[1], 1e-5, true}; },
       {3, 4, 2}},
      {"aten::batch_norm",
       "",
       {{4}, {4}},
       [=](X x, P p) {
         return torch::jit::Stack{x, p[0], p[1], none, none, true, 0.1, 1e-5, false};
       },
       {3, 4, 2}},
      {"aten::conv1d",
       "",
       {{4, 2, 3}, {4}},
       [](X x, P p) {
         const c10::List<int64_t> one({1});
         return torch::jit::Stack{x, p[0], p[1], one, one, one, 1};
       },
       {1, 2, 5}},
      {"aten::conv2d",
       "",
       {{4, 2, 3, 3}, {4}},
       [=](X x, P p) { return torch::jit::Stack{x, p[0], p[1], pair(1), pair(0), pair(1), 1}; },
       {1, 2, 5, 5}},
      {"aten::convolution",
       "",
       {{4, 2, 3, 3}},
       [=](X x, P p) {
         return torch::jit::Stack{x, p[0], none, pair(1), pair(1), pair(1), false, pair(0), 1};
       },
       {1, 2, 5, 5}},
      {"aten::convolution_backward",
       "",
       {{4, 2, 3, 3}},
       [=](X x, P p) {
         return torch::jit::Stack{
             at::ones({1, 4, 3, 3}), x, p[0], none, pair(1), pair(0), pair(1), false, pair(0), 1,
             mask(true, true, false)};
       },
       {1, 2, 5, 5}},
      {"aten::sub",
       "Tensor",
       {{6}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0], 2};
       },
       {3, 6}},
      {"aten::div",
       "Tensor",
       {{6}},
       [](X x, P p) {
         return torch::jit::Stack{x, p[0]};
       },
       {3, 6}},
      {"aten::where",
       "self",
       {{6}},
       [](X x, P p) {
         return torch::jit::Stack{x.gt(0), x, p[0]};
       },
       {3, 6}},
      {"aten::cross_entropy_loss",
       "",
       {{3, 6}, {6}},
       [](X, P p) {
         return torch::jit::Stack{p[0], at::tensor({1, 5, 1}, at::kLong), p[1].detach(), 1, -100,
                                  0.1};
       },
       {1}},
      {"aten::cat",
       "",
       {{2, 6}, {1, 6}},
       [](X x, P p) {
         return torch::jit::Stack{c10::List<at::Tensor>({p[0], x, p[1]}), 0};
       },
       {3, 6}},
      {"aten::stack",
       "",
       {{3, 6}, {3, 6}},
       [](X x, P p) {
         return torch::jit::Stack{c10::List<at::Tensor>({p[0], x, p[1]}), 1};
       },
       {3, 6}},
      on_parameter("mul", "Scalar", {0.3}),
      on_parameter("exp", "", {}),
      on_parameter("sigmoid", "", {}),
      on_parameter("tanh", "", {}),
      on_parameter("relu", "", {}),
      on_parameter("gelu", "", {"tanh"}),
      on_parameter("silu", "", {}),
      on_parameter("softplus", "", {1, 20}),
      on_parameter("dropout", "", {0.5, true}),
      on_parameter("softmax", "int", {1, none}),
      on_parameter("log_softmax", "int", {1, none}),
      on_parameter("topk", "", {2, 1, true, true}),
  };
}

std::vector<HotOperator> aliasing_operators() {
  const auto list = [](std::initializer_list<int64_t> values) {
    return IValue(c10::List<int64_t>(values));
  };
  const IValue none;
  return {
      on_parameter("t", "", {}),
      on_parameter("transpose", "int", {0, 1}),
      on_parameter("permute", "", {list({1, 0})}),
      on_parameter("view", "", {list({24})}),
      on_parameter("_unsafe_view", "", {list({24})}),
      on_parameter("_reshape_alias", "", {list({24}), list({1})}),
      on_parameter("reshape", "", {list({2, 12})}),
      on_parameter("as_strided", "", {list({3}), list({2}), 1}),
      on_parameter("expand", "", {list({2, 6, 4}), false}),
      on_parameter("unsqueeze", "", {0}),
      on_parameter("squeeze", "", {}),
      on_parameter("squeeze", "dim", {0}),
      on_parameter("slice", "Tensor", {0, 1, 5, 2}),
      on_parameter("select", "int", {0, 2}),
      on_parameter("narrow", "", {0, 1, 2}),
      on_parameter("split", "Tensor", {4, 0}),
      on_parameter("split_with_sizes", "", {list({2, 4}), 0}),
      on_parameter("chunk", "", {2, 0}),
      on_parameter("unbind", "int", {0}),
      on_parameter("diagonal", "", {0, 0, 1}),  // has no unboxed kernel
  };
}

}  // namespace fsdp::testing
