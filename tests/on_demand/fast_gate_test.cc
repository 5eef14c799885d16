// The unboxed kernels of the gate and the boxed ones that they stand in for: same values,
// same gradients, as without a gate.
#include "on_demand/gate.h"
#include "on_demand/gate_key.h"
#include "tests/on_demand/hot_operators.h"
#include "tests/on_demand/small_group.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/DispatchKeyExtractor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <optional>

namespace fsdp::testing {
namespace {

enum class Gate { kNone, kUnboxed, kBoxedTouching, kBoxedAliasing };
enum class Mode { kGrad, kNoGrad, kInference };

// What one call gives: its tensors, and the gradients of everything that requires grad.
struct Outcome {
  std::vector<at::Tensor> results;
  std::vector<bool> requires_grad;
  std::vector<at::Tensor> gradients;
};

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : results) {
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

// The keys that the dispatcher comes to the gate with: without those that fall through.
c10::DispatchKeySet dispatch_keys(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  c10::DispatchKeySet keys;
  for (const auto& tensor : tensors_of(stack)) keys = keys | tensor.key_set();
  keys = c10::impl::computeDispatchKeySet(keys, c10::DispatchKeySet(c10::DispatchKeySet::FULL));
  keys = keys.remove(c10::DispatchKey::BackendSelect);
  const auto view_key = c10::DispatchKey::ADInplaceOrView;
  return op.hasKernelForDispatchKey(view_key) ? keys : keys.remove(view_key);
}

void run(const c10::OperatorHandle& op, Gate gate, torch::jit::Stack& stack) {
  if (gate == Gate::kNone || gate == Gate::kUnboxed) return op.callBoxed(stack);
  auto* const kernel =
      gate == Gate::kBoxedTouching ? internal::touching_gate : internal::aliasing_gate;
  kernel(op, dispatch_keys(op, stack), &stack);
}

// Clones, so that nothing needs the group any longer.
std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const auto& tensor : tensors)
    values.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return values;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& results,
                                     const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> roots, wanted;
  for (const auto& result : results) {
    if (result.requires_grad()) roots.push_back(result.mul(result).sum());
  }
  for (const auto& leaf : leaves) {
    if (leaf.requires_grad()) wanted.push_back(leaf);
  }
  if (roots.empty() || !at::GradMode::is_enabled()) return {};
  return values_of(torch::autograd::grad(roots, wanted, {}, std::nullopt, /*create_graph=*/false,
                                         /*allow_unused=*/true));
}

Outcome outcome_of(const HotOperator& op, Gate gate, Mode mode) {
  at::manual_seed(3);
  at::Tensor input = at::randn(op.input).set_requires_grad(true);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : op.parameters)
    parameters.push_back(at::randn(shape).set_requires_grad(true));
  const auto group = gate == Gate::kNone ? nullptr : SmallGroup::take(parameters);
  std::optional<c10::AutoGradMode> grad_mode;
  if (mode == Mode::kNoGrad) grad_mode.emplace(false);
  std::optional<c10::InferenceMode> inference;
  if (mode == Mode::kInference) inference.emplace();
  auto stack = op.call(input, parameters);
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(op.name.c_str(), op.overload.c_str());
  run(handle, gate, stack);
  const auto results = tensors_of(stack);
  auto leaves = parameters;
  leaves.push_back(input);
  Outcome outcome{values_of(results), {}, {}};
  for (const auto& result : results) outcome.requires_grad.push_back(result.requires_grad());
  if (group) group->empty();  // backward must touch for itself
  outcome.gradients = gradients_of(results, leaves);
  return outcome;
}

void expect_equal(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(expected[i].defined(), actual[i].defined()) << i;
    EXPECT_TRUE(!expected[i].defined() || expected[i].equal(actual[i])) << i;
  }
}

void expect_agreement(const std::vector<HotOperator>& operators, Gate boxed) {
  for (const auto& op : operators) {
    for (const auto mode : {Mode::kGrad, Mode::kNoGrad, Mode::kInference}) {
      SCOPED_TRACE(op.name + "." + op.overload + " in mode " +
                   std::to_string(static_cast<int>(mode)));
      const auto plain = outcome_of(op, Gate::kNone, mode);
      ASSERT_FALSE(plain.results.empty());
      EXPECT_EQ(plain.gradients.empty(), mode != Mode::kGrad);
      for (const auto gate : {Gate::kUnboxed, boxed}) {
        SCOPED_TRACE(gate == boxed ? "boxed" : "unboxed");
        const auto gated = outcome_of(op, gate, mode);
        expect_equal(plain.results, gated.results);
        EXPECT_EQ(plain.requires_grad, gated.requires_grad);
        expect_equal(plain.gradients, gated.gradients);
      }
    }
  }
}

TEST(FastGate, HotOperatorsComputeAsWithTheBoxedGateAndWithoutOne) {
  expect_agreement(touching_operators(), Gate::kBoxedTouching);
}

TEST(FastGate, ViewsAreAsWithTheBoxedGateAndWithoutOne) {
  expect_agreement(aliasing_operators(), Gate::kBoxedAliasing);
}

TEST(FastGate, TheListsHoldOperatorsWithUnboxedKernels) {
  SmallGroup::take({at::ones({1})});
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : touching_operators()) {
    const auto handle = dispatcher.findSchemaOrThrow(op.name.c_str(), op.overload.c_str());
    EXPECT_TRUE(handle.hasKernelForDispatchKey(internal::kGateKey)) << op.name;
  }
}

}  // namespace
}  // namespace fsdp::testing
