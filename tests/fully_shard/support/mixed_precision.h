// A model in mixed precision, and the gradients it is to have.
#pragma once

#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <vector>

namespace fsdp::testing {

inline MixedPrecisionPolicy computing_in(at::ScalarType dtype) { return {.param_dtype = dtype}; }

// Layers [4, 6] and [6, 3].
inline Pair sharded(const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                    std::optional<ReshardAfterForward> reshard = {}) {
  return sharded(Pair(4, 6, 3), mesh, {.reshard_after_forward = reshard, .mp_policy = policy});
}

inline torch::Tensor input_of(int64_t rank) {
  return torch::linspace(-1, 1, 8).view({2, 4}) * static_cast<double>(rank + 1);
}

// What a rank's backward adds to the gradients of a model whose parameters were rounded
// to `dtype`, in that dtype.
inline std::vector<torch::Tensor> gradients_in(const torch::nn::Module& masters,
                                               at::ScalarType dtype, const torch::Tensor& input) {
  Pair rounded(4, 6, 3);
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < rounded->parameters().size(); ++i)
      rounded->parameters()[i].copy_(masters.parameters()[i]);
  }
  rounded->to(dtype);
  rounded->forward(input.to(dtype)).pow(2).sum().backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : rounded->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

// The mean over the ranks of gradients in `wire`, added up in float.
inline std::vector<torch::Tensor> mean_gradients(const torch::nn::Module& masters, int64_t world,
                                                 at::ScalarType compute, at::ScalarType wire) {
  std::vector<torch::Tensor> mean;
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto gradients = gradients_in(masters, compute, input_of(rank));
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto term = gradients[i].to(wire).to(at::kFloat);
      if (rank == 0) {
        mean.push_back(term);
      } else {
        mean[i] = mean[i] + term;
      }
    }
  }
  for (auto& each : mean) each = each / world;
  return mean;
}

inline void expect_close(const torch::Tensor& actual, const torch::Tensor& expected,
                         int64_t world) {
  ASSERT_TRUE(actual.defined());
  EXPECT_EQ(actual.scalar_type(), at::kFloat);
  // Up to two ranks there is one order of a sum.
  const double tolerance = world <= 2 ? 0 : 1e-6;
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance))
      << (actual - expected).abs().max();
}

// Large enough for the padding of chunks not to count.
inline torch::nn::Linear large_linear() {
  torch::nn::Linear linear(torch::nn::LinearOptions(64, 48).bias(false));
  set_start_values(*linear);
  return linear;
}

}  // namespace fsdp::testing
