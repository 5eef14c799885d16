// How the transformer of transformer.h is cut over the ranks of a "tp" mesh dimension.
#pragma once

#include "tensor_parallel/parallel_plan.h"

#include <cstdint>
#include <string>
#include <vector>

namespace programs {

// What the residual stream is cut by, between attention and mlp: along the tokens, or by
// nothing.
inline fsdp::Placement between_layers(bool sequence_parallel) {
  return sequence_parallel ? fsdp::Placement(fsdp::Shard{1}) : fsdp::Replicate{};
}

// Heads, of `head_width` columns, stay whole.
inline fsdp::ParallelPlan transformer_plan(int64_t head_width, bool sequence_parallel) {
  using namespace fsdp;
  const Placement between = between_layers(sequence_parallel);
  ParallelPlan plan = {
      {"embedding", RowwiseParallel{.output_layout = between}},
      {"block*.attention.*", ColwiseParallel{.unit = head_width}},
      {"block*.attention.output", RowwiseParallel{.output_layout = between, .unit = head_width}},
      {"block*.mlp.*", ColwiseParallel{}},
      {"block*.mlp.down", RowwiseParallel{.output_layout = between}},
      {"head", ColwiseParallel{}}};
  if (sequence_parallel)
    for (const char* norm : {"block*.*norm", "norm"}) plan.emplace_back(norm, SequenceParallel{});
  return plan;
}

// What adapters (lora.h) of these layers add to it: of the two matrices the one is cut
// that has the layer's cut dimension, as the layer is, and the other is whole on every
// rank.
inline fsdp::ParallelPlan adapter_plan(const std::vector<std::string>& layers, int64_t head_width,
                                       bool sequence_parallel) {
  using namespace fsdp;
  const Placement between = between_layers(sequence_parallel);
  ParallelPlan plan;
  for (const auto& layer : layers) {
    const bool is_of_mlp = layer == "gate" || layer == "up" || layer == "down";
    const int64_t unit = is_of_mlp ? 1 : head_width;
    const auto path = (is_of_mlp ? "block*.mlp." : "block*.attention.") + layer;
    if (layer == "output" || layer == "down") {
      plan.emplace_back(path + ".lora_A", RowwiseParallel{.output_layout = between, .unit = unit});
    } else {
      plan.emplace_back(path + ".lora_B", ColwiseParallel{.unit = unit});
    }
  }
  return plan;
}

}  // namespace programs
