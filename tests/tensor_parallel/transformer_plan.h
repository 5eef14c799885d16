// The plan of the example's transformer, and its loss in the dtype of the logits.
#pragma once

#include "tensor_parallel/parallel_plan.h"

#include <torch/torch.h>

#include <optional>

namespace fsdp::testing {

inline ParallelPlan transformer_plan(int64_t head_width, bool cut_sequence) {
  const auto layout = cut_sequence ? std::optional<Placement>(Shard{1}) : std::nullopt;
  const ColwiseParallel heads{.unit = head_width};
  ParallelPlan plan = {
      {"embedding", RowwiseParallel{.output_layout = layout}},
      {"block*.attention.query", heads},
      {"block*.attention.key", heads},
      {"block*.attention.value", heads},
      {"block*.attention.output", RowwiseParallel{.output_layout = layout, .unit = head_width}},
      {"block*.mlp.gate", ColwiseParallel{}},
      {"block*.mlp.up", ColwiseParallel{}},
      {"block*.mlp.down", RowwiseParallel{.output_layout = layout}},
      {"head", ColwiseParallel{}}};
  if (!cut_sequence) return plan;
  plan.emplace_back("*norm", SequenceParallel{});
  plan.emplace_back("block*.*norm", SequenceParallel{});
  return plan;
}

inline at::Tensor transformer_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace fsdp::testing
