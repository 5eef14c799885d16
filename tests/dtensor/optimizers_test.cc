// Stock optimizers on DTensors: the same bits as on plain tensors.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim.h>

#include <functional>
#include <limits>
#include <memory>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

// Uneven, and with fewer rows than ranks.
std::vector<at::Tensor> plain_parameters() {
  std::vector<at::Tensor> parameters;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{5, 3}, {1, 4}, {2}, {7}}) {
    const at::Tensor flat = at::arange(c10::multiply_integers(shape), at::kFloat).mul(0.37).sin();
    parameters.push_back(flat.view(shape).clone().set_requires_grad(true));
  }
  return parameters;
}

at::Tensor gradient_of(const at::Tensor& parameter, int step) {
  return at::arange(parameter.numel(), at::kFloat)
      .add(step)
      .mul(0.71)
      .cos()
      .view(parameter.sizes())
      .clone();
}

void expect_same_bits(const MakeOptimizer& make) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const auto plain = plain_parameters();
      std::vector<at::Tensor> sharded;
      for (const at::Tensor& parameter : plain)
        sharded.push_back(distribute_tensor(parameter, mesh, {Shard{0}}));
      const auto plain_optimizer = make(plain);
      const auto sharded_optimizer = make(sharded);
      for (int step = 0; step < 3; ++step) {
        plain_optimizer->zero_grad();
        sharded_optimizer->zero_grad();
        for (size_t i = 0; i < plain.size(); ++i) {
          const at::Tensor gradient = gradient_of(plain[i], step);
          plain[i].mutable_grad() = gradient;
          sharded[i].mutable_grad() = distribute_tensor(gradient, mesh, {Shard{0}});
        }
        plain_optimizer->step();
        sharded_optimizer->step();
        for (size_t i = 0; i < plain.size(); ++i) {
          EXPECT_TRUE(DTensor(sharded[i]).full_tensor().equal(plain[i]))
              << "step " << step << " parameter " << i;
          EXPECT_TRUE(sharded[i].is_leaf() && sharded[i].requires_grad());
        }
      }
    });
  }
}

TEST(StockOptimizers, Sgd) {
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true));
  });
  expect_same_bits(
      [](auto parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.1); });
}

TEST(StockOptimizers, Adam) {
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::Adam>(parameters,
                                                torch::optim::AdamOptions(0.1).weight_decay(0.01));
  });
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::Adam>(parameters,
                                                torch::optim::AdamOptions(0.1).amsgrad(true));
  });
}

TEST(StockOptimizers, AdamW) {
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters,
                                                 torch::optim::AdamWOptions(0.1).amsgrad(true));
  });
}

TEST(StockOptimizers, Adagrad) {
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.1)
                                                                   .lr_decay(0.01)
                                                                   .weight_decay(0.01)
                                                                   .initial_accumulator_value(0.1));
  });
}

TEST(StockOptimizers, RmsProp) {
  expect_same_bits([](auto parameters) {
    return std::make_unique<torch::optim::RMSprop>(
        parameters,
        torch::optim::RMSpropOptions(0.1).momentum(0.9).centered(true).weight_decay(0.01));
  });
  expect_same_bits(
      [](auto parameters) { return std::make_unique<torch::optim::RMSprop>(parameters, 0.1); });
}

// Minimises sum((p - 1)^2); the gradient is that of the loss on plain tensors, placed as
// the parameter.
double lbfgs_loss(const std::vector<at::Tensor>& parameters, const Placement& placement) {
  torch::optim::LBFGS optimizer(parameters,
                                torch::optim::LBFGSOptions(0.5).max_iter(4).history_size(3));
  return optimizer
      .step([&] {
        at::Tensor loss = at::zeros({});
        for (const at::Tensor& parameter : parameters) {
          at::NoGradGuard no_grad;
          const bool distributed = is_dtensor(parameter);
          const at::Tensor away =
              (distributed ? DTensor(parameter).full_tensor() : parameter).sub(1);
          loss = loss + away.square().sum();
          const at::Tensor gradient = away.mul(2);
          parameter.mutable_grad() =
              distributed
                  ? distribute_tensor(gradient, DTensor(parameter).device_mesh(), {placement})
                  : gradient;
        }
        return loss;
      })
      .item<double>();
}

TEST(StockOptimizers, LbfgsTrainsShardsAsItDoesPlainTensors) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const auto plain = plain_parameters();
      std::vector<at::Tensor> replicated;
      std::vector<at::Tensor> sharded;
      for (const at::Tensor& parameter : plain) {
        replicated.push_back(distribute_tensor(parameter, mesh, {Replicate{}}));
        sharded.push_back(distribute_tensor(parameter, mesh, {Shard{0}}));
      }
      const double loss = lbfgs_loss(plain, Replicate{});
      EXPECT_EQ(lbfgs_loss(replicated, Replicate{}), loss);
      EXPECT_EQ(lbfgs_loss(sharded, Shard{0}), loss);
      for (const auto& parameters : {replicated, sharded}) {
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(DTensor(parameters[i]).full_tensor().equal(plain[i]));
        EXPECT_TRUE(DTensor(torch::nn::utils::parameters_to_vector(parameters))
                        .full_tensor()
                        .equal(torch::nn::utils::parameters_to_vector(plain)));
      }
      EXPECT_THAT(error_of([&] {
                    torch::nn::utils::vector_to_parameters(
                        torch::nn::utils::parameters_to_vector(plain), sharded);
                  }),
                  HasSubstr("set_data"));
      EXPECT_TRUE(is_dtensor(sharded[0]));
    });
  }
}

TEST(StockOptimizers, ClippingByValue) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const at::Tensor plain = plain_parameters()[0];
      const at::Tensor sharded = distribute_tensor(plain, mesh, {Shard{0}});
      plain.mutable_grad() = gradient_of(plain, 1);
      sharded.mutable_grad() = distribute_tensor(plain.grad(), mesh, {Shard{0}});
      torch::nn::utils::clip_grad_value_(plain, 0.25);
      torch::nn::utils::clip_grad_value_(sharded, 0.25);
      EXPECT_TRUE(DTensor(sharded.grad()).full_tensor().equal(plain.grad()));
    });
  }
}

TEST(StockOptimizers, ClippingAndZeroGrad) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      for (double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
        const auto plain = plain_parameters();
        std::vector<at::Tensor> sharded;
        for (const at::Tensor& parameter : plain) {
          sharded.push_back(distribute_tensor(parameter, mesh, {Shard{0}}));
          parameter.mutable_grad() = gradient_of(parameter, 1);
          sharded.back().mutable_grad() = distribute_tensor(parameter.grad(), mesh, {Shard{0}});
        }
        const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.5, p);
        EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(sharded, 0.5, p), expected, 1e-5 * expected)
            << p;
        for (size_t i = 0; i < plain.size(); ++i) {
          EXPECT_TRUE(at::allclose(DTensor(sharded[i].grad()).full_tensor(), plain[i].grad()));
        }
        torch::optim::SGD optimizer(sharded, 0.1);
        optimizer.zero_grad(/*set_to_none=*/false);
        EXPECT_TRUE(DTensor(sharded[0].grad()).full_tensor().eq(0).all().item<bool>());
      }
    });
  }
}

TEST(StockOptimizers, GradientsAccumulateOnLeaves) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      const at::Tensor plain = plain_parameters()[0];
      const at::Tensor sharded = distribute_tensor(plain, mesh, {Shard{0}});
      for (int i = 0; i < 2; ++i) {
        plain.mul(plain).sum().backward();
        sharded.mul(sharded).sum().backward();
      }
      ASSERT_TRUE(is_dtensor(sharded.grad()));
      EXPECT_TRUE(DTensor(sharded.grad()).full_tensor().equal(plain.grad()));
    });
  }
}

}  // namespace
}  // namespace fsdp
