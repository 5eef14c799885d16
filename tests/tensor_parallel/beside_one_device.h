// One model plain and the same model tensor-parallel, side by side on every rank.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tensor_parallel/parallelize_module.h"
#include "tests/support/default_generator.h"
#include "tests/support/full_value.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>

namespace fsdp::testing {

// float64: only rounding differs.
inline constexpr double kClose = 1e-11;

// make() with the generator at `seed`.
template <class Make>
auto drawn(uint64_t seed, const Make& make, c10::ScalarType dtype = torch::kFloat64) {
  auto module = drawn_from_seed(seed, make);
  module->to(dtype);
  return module;
}

inline at::Tensor drawn_tensor(uint64_t seed, at::IntArrayRef shape) {
  return drawn_from_seed(seed, [&] { return torch::randn(shape, torch::kFloat64); });
}

// Largest difference, relative to the largest element.
inline double distance(const at::Tensor& found, const at::Tensor& wanted) {
  const double scale = wanted.abs().max().item<double>();
  return (found - wanted).abs().max().item<double>() / (scale > 0 ? scale : 1);
}

inline void expect_same_gradients(torch::nn::Module& parallel, torch::nn::Module& plain,
                                  double tolerance) {
  const auto wanted = plain.named_parameters();
  for (const auto& item : parallel.named_parameters()) {
    const at::Tensor grad = full_gradient(item.value());
    const at::Tensor& expected = wanted[item.key()].grad();
    ASSERT_EQ(grad.defined(), expected.defined()) << item.key();
    if (!grad.defined()) continue;
    EXPECT_EQ(is_dtensor(item.value()), is_dtensor(item.value().grad())) << item.key();
    EXPECT_EQ(grad.sizes(), expected.sizes()) << item.key();
    EXPECT_LE(distance(grad, expected), tolerance) << item.key();
  }
}

inline void expect_same_values(torch::nn::Module& parallel, torch::nn::Module& plain,
                               double tolerance) {
  const auto wanted = plain.named_parameters();
  for (const auto& item : parallel.named_parameters()) {
    EXPECT_LE(distance(full_value(item.value()), wanted[item.key()].detach()), tolerance)
        << item.key();
  }
}

// Of what a step of AdamW changed, which divides by the gradients.
inline constexpr double kCloseLater = 1e-9;

// Steps of AdamW on both lead to the same values. `backward` runs one of each, and may
// compare: gradients of step 0 within kClose, of later ones within kCloseLater.
inline void expect_same_adamw_steps(torch::nn::Module& parallel, torch::nn::Module& plain,
                                    int steps, const std::function<void(int step)>& backward) {
  const auto adamw = torch::optim::AdamWOptions(1e-2).eps(1e-3);
  torch::optim::AdamW theirs(plain.parameters(), adamw), ours(parallel.parameters(), adamw);
  for (int step = 0; step < steps; ++step) {
    theirs.zero_grad();
    ours.zero_grad();
    backward(step);
    theirs.step();
    ours.step();
  }
  expect_same_values(parallel, plain, kCloseLater);
}

}  // namespace fsdp::testing
