// Fused optimizer operators on DTensors, on uneven and empty shards. Their kernels round
// an element in the vectorised part of a tensor otherwise than one in its tail, so
// results are close, not bit-equal.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_meshes;
using testing::whole;
using Tensors = std::vector<at::Tensor>;

Tensors values(double seed) {
  Tensors list;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{5, 3}, {1, 4}, {2}, {7, 1}}) {
    const at::Tensor flat =
        at::arange(c10::multiply_integers(shape), at::kFloat).add(seed).mul(0.37).sin();
    list.push_back(flat.view(shape).clone());
  }
  return list;
}

Tensors distributed(const Tensors& plain, const DeviceMesh& mesh, const Placement& placement) {
  std::vector<Placement> placements(static_cast<size_t>(mesh.ndim()), Replicate{});
  placements.back() = placement;
  Tensors list;
  for (const at::Tensor& tensor : plain)
    list.push_back(distribute_tensor(tensor, mesh, placements));
  return list;
}

struct State {
  Tensors parameters;
  Tensors gradients;
  std::vector<Tensors> buffers;  // as many as the operator wants
  Tensors steps;                 // plain
};

State plain_state(int buffers) {
  State state{.parameters = values(0), .gradients = values(1), .buffers = {}, .steps = {}};
  for (int i = 0; i < buffers; ++i) {
    state.buffers.push_back(values(2 + i));
    for (at::Tensor& buffer : state.buffers.back()) buffer.abs_();
  }
  for (size_t i = 0; i < state.parameters.size(); ++i) state.steps.push_back(at::ones({}));
  return state;
}

State distributed_state(const State& plain, const DeviceMesh& mesh,
                        const Placement& gradient_placement) {
  State state{.parameters = distributed(plain.parameters, mesh, Shard{0}),
              .gradients = distributed(plain.gradients, mesh, gradient_placement),
              .buffers = {},
              .steps = {}};
  for (const auto& buffer : plain.buffers)
    state.buffers.push_back(distributed(buffer, mesh, Shard{0}));
  for (const at::Tensor& step : plain.steps) state.steps.push_back(step.clone());
  return state;
}

void expect_same(int buffers, const std::function<void(const State&)>& step) {
  on_meshes([&](const DeviceMesh& mesh) {
    for (const Placement& gradient_placement : {Placement(Shard{0}), Placement(Replicate{})}) {
      const State plain = plain_state(buffers);
      const State sharded = distributed_state(plain, mesh, gradient_placement);
      for (int i = 0; i < 3; ++i) {
        step(plain);
        step(sharded);
      }
      for (size_t i = 0; i < plain.parameters.size(); ++i) {
        EXPECT_TRUE(whole(sharded.parameters[i]).allclose(plain.parameters[i], 1e-6, 1e-6))
            << mesh << " parameter " << i;
        for (size_t b = 0; b < plain.buffers.size(); ++b) {
          EXPECT_TRUE(whole(sharded.buffers[b][i]).allclose(plain.buffers[b][i], 1e-6, 1e-6))
              << mesh << " state " << b;
        }
      }
    }
  });
}

TEST(FusedOptimizers, AdamAndAdamW) {
  for (const bool amsgrad : {false, true}) {
    expect_same(3, [amsgrad](const State& s) {
      const Tensors maxima = amsgrad ? s.buffers[2] : Tensors{};
      at::_fused_adamw_(s.parameters, s.gradients, s.buffers[0], s.buffers[1], maxima, s.steps, 0.1,
                        0.9, 0.99, 0.01, 1e-8, amsgrad, false);
      at::_fused_adam_(s.parameters, s.gradients, s.buffers[0], s.buffers[1], maxima, s.steps,
                       at::full({}, 0.1), 0.9, 0.99, 0.01, 1e-8, amsgrad, true);
    });
  }
}

TEST(FusedOptimizers, Sgd) {
  expect_same(1, [](const State& s) {
    at::_fused_sgd_(s.parameters, s.gradients, s.buffers[0], 0.01, 0.9, 0.1, 0, true, false, false);
    at::_fused_sgd_(s.parameters, s.gradients, {}, 0.01, 0, 0.1, 0, false, false, true);
  });
}

TEST(FusedOptimizers, Adagrad) {
  expect_same(1, [](const State& s) {
    at::_fused_adagrad_(s.parameters, s.gradients, s.buffers[0], s.steps, 0.1, 0.01, 0.01, 1e-8,
                        false);
  });
}

TEST(FusedOptimizers, StatesMustLieAsTheirParameters) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const State plain = plain_state(1);
    const State sharded = distributed_state(plain, mesh, Shard{0});
    const auto step = [&](const Tensors& parameters, const Tensors& gradients,
                          const Tensors& momentum) {
      at::_fused_sgd_(parameters, gradients, momentum, 0, 0.9, 0.1, 0, false, false, false);
    };
    EXPECT_THAT(error_of([&] { step(sharded.parameters, sharded.gradients, plain.buffers[0]); }),
                HasSubstr("momentum_buffer_list[0]: plain tensor of shape [5, 3]"));
    const Tensors replicated = distributed(plain.buffers[0], mesh, Replicate{});
    EXPECT_THAT(error_of([&] { step(sharded.parameters, sharded.gradients, replicated); }),
                HasSubstr("make states with at::zeros_like(parameter)"));
    EXPECT_THAT(error_of([&] { step(plain.parameters, sharded.gradients, plain.buffers[0]); }),
                HasSubstr("self[0] is a plain tensor"));
    EXPECT_THAT(error_of([&] { step(sharded.parameters, {sharded.gradients[0]}, {}); }),
                HasSubstr("one per parameter"));
  });
}

}  // namespace
}  // namespace fsdp
