// What the examples in README.md, docs/ and the comments of public headers use without
// declaring it.
#pragma once

#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/name_map.h"
#include "dtensor/context_parallel.h"
#include "experts/route_to_experts.h"
#include "fully_shard/fully_shard.h"
#include "optim/muon_with_adamw.h"
#include "optim/owned_step.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/model/transformer_plan.h"
#include "tensor_parallel/communication_log.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <tuple>
#include <vector>

namespace {

using programs::Block;
using programs::Transformer;

programs::TransformerConfig config;
Transformer model{nullptr}, sharded_model{nullptr};
torch::nn::TransformerEncoderLayer block{nullptr};  // forward(x) and forward(x, mask)
torch::nn::Linear linear{nullptr}, layer{nullptr}, router{nullptr};
programs::Mixture mixture{nullptr};
torch::nn::ModuleList layers;
fsdp::DeviceMesh mesh = fsdp::init_device_mesh(torch::kCPU, {1});
torch::optim::AdamW optimizer{std::vector<torch::Tensor>{}};
torch::optim::AdamW sharded_optimizer{std::vector<torch::Tensor>{}};
torch::optim::StepLR scheduler{optimizer, 1};
fsdp::ParallelPlan plan;
torch::Tensor tokens, targets, x, mask, full, up, down;
std::vector<torch::Tensor> batches, matrices, others, params;
std::vector<size_t> positions_with_gradients;
fsdp::DTensor weight = fsdp::distribute_tensor(full, mesh, {fsdp::Shard{0}});
std::string path;
int64_t step, world_size, nodes, ranks_per_node, head_width, rows;
size_t i;
double lr;
bool interrupted;

// The loss, and the function that computes it.
struct Loss : torch::Tensor {
  template <class... Tensors>
  torch::Tensor operator()(const Tensors&... tensors) const {
    return (tensors + ...);
  }
};
Loss loss;

[[maybe_unused]] std::tuple<torch::Tensor, torch::Tensor> attend(const torch::Tensor& x,
                                                                 const torch::Tensor& mask) {
  return {x, mask};
}

[[maybe_unused]] void my_kernel(float*) {}

[[maybe_unused]] torch::Tensor update(size_t, const torch::Tensor& whole) { return whole; }

}  // namespace
