// How the transformer of transformer.h is cut over the ranks of a "tp" mesh dimension.
#pragma once

#include "tensor_parallel/parallel_plan.h"

#include <cstdint>

namespace examples {

// Heads, of `head_width` columns, stay whole. With `sequence_parallel` what lies between
// attention and mlp is cut along the tokens.
inline fsdp::ParallelPlan transformer_plan(int64_t head_width, bool sequence_parallel) {
  using namespace fsdp;
  const Placement between = sequence_parallel ? Placement(Shard{1}) : Replicate{};
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

}  // namespace examples
