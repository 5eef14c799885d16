// A model of which each rank may use another part, sharded beside a plain one that sees
// the data of all ranks.
#pragma once

#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/start_values.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

struct ExpertsImpl : torch::nn::Module {
  static constexpr int64_t kCount = 4, kWidth = 6;

  ExpertsImpl() {
    router = register_module("router", torch::nn::Linear(kWidth, kWidth));
    for (int64_t i = 0; i < kCount; ++i) {
      experts.push_back(torch::nn::Linear(kWidth, kWidth));
      register_module("expert" + std::to_string(i), experts.back());
    }
    head = register_module("head", torch::nn::Linear(kWidth, 1));
    set_start_values(*this);
    to(torch::kDouble);
  }
  // Through `used`, in that order.
  torch::Tensor forward(const torch::Tensor& x, const std::vector<int64_t>& used) {
    auto hidden = torch::tanh(router(x));
    for (const auto each : used)
      hidden = hidden + torch::tanh(experts[static_cast<size_t>(each)](hidden));
    return head(hidden);
  }

  torch::nn::Linear router = nullptr, head = nullptr;
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

// What one rank does before the optimizer's step: some micro-batches.
struct MicroBatch {
  torch::Tensor input;
  std::vector<int64_t> experts;
};
using RanksStep = std::vector<MicroBatch>;

// Every layer and the root as units.
inline Experts sharded_experts(const DeviceMesh& mesh, const FullyShardOptions& options) {
  Experts model;
  for (const auto& child : model->children()) fully_shard(*child, mesh, options);
  fully_shard(model, mesh, options);
  return model;
}

class ExpertTwins {
 public:
  explicit ExpertTwins(const DeviceMesh& mesh, const FullyShardOptions& options = {})
      : model(sharded_experts(mesh, options)), world_(mesh.size()), rank_(mesh.rank()) {}

  FSDPModule unit() { return get_fsdp_module(*model); }

  // Of all ranks, on the plain one.
  void plain_backward(const std::vector<RanksStep>& steps) {
    for (const auto& of_rank : steps) {
      for (const auto& batch : of_rank)
        (plain(batch.input, batch.experts).pow(2).sum() / world_).backward();
    }
  }
  // Of this rank alone.
  void backward(const MicroBatch& batch) {
    model(batch.input, batch.experts).pow(2).sum().backward();
  }
  void backward_all(const RanksStep& batches) {
    for (size_t i = 0; i < batches.size(); ++i) {
      unit().set_is_last_backward(i + 1 == batches.size());
      backward(batches[i]);
    }
  }
  void optimizer_steps() {
    for (auto* optimizer : {&of_plain_, &of_model_}) {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  void step(const std::vector<RanksStep>& steps) {
    plain_backward(steps);
    backward_all(steps[static_cast<size_t>(rank_)]);
    expect_equal_gradients();
    optimizer_steps();
  }

  // Local: of this rank's parts.
  void expect_equal_gradients() const {
    const auto sharded = model->named_parameters(), whole = plain->named_parameters();
    for (const auto& item : whole) {
      const auto gradient = sharded[item.key()].grad();
      ASSERT_EQ(gradient.defined(), item.value().grad().defined()) << item.key();
      if (!gradient.defined()) continue;
      const auto rows = item.value().size(0), chunk = (rows + world_ - 1) / world_;
      const auto first = std::min(rank_ * chunk, rows), last = std::min(first + chunk, rows);
      const auto part = item.value().grad().slice(0, first, last);
      EXPECT_TRUE(torch::allclose(DTensor(gradient).to_local(), part, 1e-9, 1e-12)) << item.key();
    }
  }
  // Reads the newest values of all ranks, of these units alone.
  void expect_equal_forward(const MicroBatch& batch) {
    const torch::NoGradGuard no_grad;
    const auto sharded = model(batch.input, batch.experts);
    EXPECT_TRUE(torch::allclose(sharded, plain(batch.input, batch.experts), 1e-8, 1e-11));
  }

  Experts plain, model;

 private:
  int64_t world_, rank_;
  torch::optim::Adam of_plain_{plain->parameters(), torch::optim::AdamOptions(0.01)},
      of_model_{model->parameters(), torch::optim::AdamOptions(0.01)};
};

inline torch::Tensor expert_input(int64_t rank, int64_t number, int64_t samples = 3) {
  return torch::linspace(-1, 1, samples * ExpertsImpl::kWidth, torch::kDouble)
             .view({samples, ExpertsImpl::kWidth}) +
         0.1 * static_cast<double>(rank + 3 * number);
}

}  // namespace fsdp::testing
