// How the parameters of a module lie over the ranks of a tensor-parallel mesh: a style
// for each module, found by its path.
//
//   fsdp::ParallelPlan plan = {
//       {"embedding", fsdp::RowwiseParallel{}},
//       {"block*.attention.query", fsdp::ColwiseParallel{.unit = head_width}},
//       {"block*.attention.output", fsdp::RowwiseParallel{.unit = head_width}},
//   };
//
// Placements say how things lie along the one dimension of the mesh. A dimension below
// zero counts from the end.
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp {

// Linear: the columns of its output are cut, so weight and bias are cut along dimension
// 0, and its input must be whole. Embedding: the columns of its table are cut.
// MultiheadAttention, with sections = 3: its heads are cut, and its output projection is
// row-wise, with the output_layout given here.
struct ColwiseParallel {
  std::optional<Placement> output_layout = {};  // default: the last dimension stays cut
  int64_t unit = 1;      // columns that stay together: the width of a head, which attention knows
  int64_t sections = 1;  // each cut by itself: 3 for packed query, key and value
};

// Linear: the columns of its input are cut, so the weight is cut along dimension 1; the
// ranks' results are summed, and the bias, whole on every rank, is added after that.
// Embedding: the rows of its table are cut, a part of the vocabulary on each rank.
struct RowwiseParallel {
  std::optional<Placement> output_layout = {};  // default: Replicate, a plain tensor
  int64_t unit = 1;                             // as that of what makes the input
};

// For LayerNorm and norms of your own: the parameters are whole on every rank, and the
// input of layer_norm and rms_norm is cut along the sequence.
struct SequenceParallel {
  int64_t sequence_dim = 1;
};

// The parameters are whole on every rank. `input_layout` says where Linear and norms want
// their input, if not as it comes: with the sequence cut, keys and values of fewer heads
// than ranks take it whole, as the query's ColwiseParallel does, so that it is gathered
// once for all three.
struct ReplicateParallel {
  std::optional<Placement> input_layout = {};  // default: as it is
};

// For one parameter, which the path names itself, however it is used.
struct ShardParameter {
  Placement placement;
};

// Experts, of which each rank has some, and none where there are fewer of them than
// ranks. The path means a module whose parameters have a dimension of experts, their
// first. What brings tokens to them is experts/route_to_experts.h: an operator that is
// given a plain tensor beside such a parameter computes with this rank's part. Over a
// mesh dimension whose ranks have batches of their own; fully_shard() over the other ones
// divides gradients by the ranks of both, as those of the modules around it.
struct ExpertParallel {};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel,
                                   ReplicateParallel, ShardParameter, ExpertParallel>;

// Dotted paths of modules or parameters below the module that is parallelized, "" for
// itself. A '*' stands for any part of one name: "block*.mlp.up" for "block0.mlp.up".
// There is nothing else to match with: no "**", no "?", no "[0-9]". Later entries win.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

}  // namespace fsdp
