#include "tests/fully_shard/support/parity.h"

#include "tests/support/gradient_bound.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fsdp::testing {

uint64_t data_seed(uint64_t step, int64_t rank) {
  return 100 * step + static_cast<uint64_t>(rank) + 7;
}

Data make_data(uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto normal = [&](std::vector<int64_t> shape) { return at::randn(shape, generator); };
  return {normal({4, 8, 16}), normal({2, 3, 16, 16}), normal({2, 3, 20}), normal({2, 3, 8, 8, 8}),
          at::randint(10, {4, 5}, generator)};
}

namespace {

// Of the scale that layers draw at. Constants, as in norms, stay.
void draw_values(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(1);
  for (auto& parameter : module.parameters()) {
    if (parameter.numel() == 0) continue;
    if (parameter.numel() > 1 && parameter.eq(parameter.flatten()[0]).all().item<bool>()) continue;
    const auto rows = parameter.dim() > 1 ? parameter.size(0) : 1;
    const auto bound = 1 / std::sqrt(static_cast<double>(parameter.numel() / rows));
    parameter.copy_(at::empty(parameter.sizes()).uniform_(-bound, bound, generator));
  }
}

}  // namespace

Model build_seeded(const BuildModel& build) {
  auto model = build();
  draw_values(*model.module);
  return model;
}

std::vector<torch::Tensor> gradients_of(const Model& model, const Data& data) {
  for (auto& parameter : model.module->parameters()) parameter.mutable_grad().reset();
  model.loss(data).backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : model.module->parameters()) gradients.push_back(parameter.grad());
  for (auto& parameter : model.module->parameters()) parameter.mutable_grad().reset();
  return gradients;
}

ExpectedGradients expected_gradients(const Model& model, int64_t world, uint64_t step) {
  ExpectedGradients expected;
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto gradients = gradients_of(model, make_data(data_seed(step, rank)));
    expected.mean.resize(gradients.size());
    expected.bound.resize(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      auto& mean = expected.mean[i];
      auto& bound = expected.bound[i];
      mean = mean.defined() ? mean + gradients[i] : gradients[i].clone();
      bound = bound.defined() ? bound + gradients[i].abs() : gradients[i].abs();
    }
  }
  for (auto& mean : expected.mean) {
    if (mean.defined()) mean.div_(world);
  }
  for (auto& bound : expected.bound) {
    if (bound.defined()) bound = gradient_bound(bound, world);
  }
  return expected;
}

void expect_gradients(const torch::nn::Module& sharded, const ExpectedGradients& expected,
                      int64_t world, const std::string& what) {
  const auto named = sharded.named_parameters();
  ASSERT_EQ(named.size(), expected.mean.size());
  for (size_t i = 0; i < named.size(); ++i) {
    const auto label = what + ", gradient of " + named[i].key();
    const auto& gradient = named[i].value().grad();
    ASSERT_EQ(gradient.defined(), expected.mean[i].defined()) << label;
    if (!gradient.defined()) continue;
    ASSERT_TRUE(is_dtensor(gradient)) << label;
    const auto full = DTensor(gradient).full_tensor();
    if (world <= 2) {
      EXPECT_TRUE(torch::equal(full, expected.mean[i]))
          << label << " differs by " << (full - expected.mean[i]).abs().max();
    } else {
      EXPECT_TRUE(is_within(full, expected.mean[i], expected.bound[i])) << label;
    }
  }
}

void expect_parity(int64_t world, const BuildModel& build, const ShardModel& shard,
                   const std::string& what) {
  run_ranks(world, [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {world});
    const auto plain = build_seeded(build);
    const auto sharded = build_seeded(build);
    shard(*sharded.module, mesh);
    torch::optim::SGD plain_optimizer(plain.module->parameters(), 0.01);
    torch::optim::SGD sharded_optimizer(sharded.module->parameters(), 0.01);
    for (uint64_t step = 0; step < 2; ++step) {
      const auto label =
          what + ", world " + std::to_string(world) + ", step " + std::to_string(step);
      const auto buffers = plain.module->named_buffers();
      std::vector<torch::Tensor> saved;
      for (const auto& buffer : buffers) saved.push_back(buffer.value().clone());
      const auto expected = expected_gradients(plain, world, step);
      const auto mine = make_data(data_seed(step, rank));
      {
        torch::NoGradGuard
            no_grad;  // buffers are per rank: as if only this rank's data had been seen
        for (size_t i = 0; i < saved.size(); ++i) buffers[i].value().copy_(saved[i]);
      }
      const auto plain_loss = plain.loss(mine).detach();
      const auto loss = sharded.loss(mine);
      EXPECT_TRUE(torch::equal(loss.detach(), plain_loss))
          << label << ": " << loss << " " << plain_loss;
      loss.backward();
      expect_gradients(*sharded.module, expected, world, label);
      auto parameters = plain.module->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        // The sharded mean itself, so that a third rank's rounding does not spread into
        // the second step.
        const auto& gradient = sharded.module->parameters()[i].grad();
        parameters[i].mutable_grad() =
            gradient.defined() ? DTensor(gradient).full_tensor() : torch::Tensor();
      }
      plain_optimizer.step();
      sharded_optimizer.step();
      sharded_optimizer.zero_grad();
      plain_optimizer.zero_grad();
      for (size_t i = 0; i < parameters.size(); ++i) {
        torch::NoGradGuard no_grad;
        const auto full = DTensor(sharded.module->parameters()[i]).full_tensor();
        EXPECT_TRUE(torch::equal(full, parameters[i])) << label << ", parameter " << i;
      }
    }
  });
}

void shard_whole(torch::nn::Module& module, const DeviceMesh& mesh) { fully_shard(module, mesh); }

void shard_children(torch::nn::Module& module, const DeviceMesh& mesh) {
  for (const auto& child : module.children()) fully_shard(*child, mesh);
  fully_shard(module, mesh);
}

}  // namespace fsdp::testing
