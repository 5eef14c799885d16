// What the blocks of C++ in README.md and docs/ use without declaring it.
#pragma once

#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "examples/transformer.h"
#include "examples/transformer_plan.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/communication_log.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/torch.h>

#include <iostream>
#include <string>

namespace {

using examples::Block;
using examples::Transformer;

examples::TransformerConfig config;
Transformer model{nullptr}, sharded_model{nullptr};
fsdp::DeviceMesh mesh = fsdp::init_device_mesh(torch::kCPU, {1});
torch::optim::AdamW optimizer{std::vector<torch::Tensor>{}};
torch::optim::AdamW sharded_optimizer{std::vector<torch::Tensor>{}};
torch::optim::StepLR scheduler{optimizer, 1};
fsdp::ParallelPlan plan;
torch::Tensor tokens, targets;
int64_t step, world_size, nodes, ranks_per_node, head_width;

template <class... Tensors>
torch::Tensor loss(const Tensors&... tensors) {
  return (tensors + ...);
}

}  // namespace
