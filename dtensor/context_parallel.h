// Long sequences: batches that are cut along the sequence (context parallelism).
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 4}, {"dp", "cp"});
//   // tokens: [batch, sequence], the same on the ranks of a row of "cp"
//   auto part = fsdp::distribute_tensor(tokens, mesh["cp"], {fsdp::Shard{1}});
//   loss(model->forward(part), targets).backward();   // the model's code is unchanged
//
// What works position by position works on parts. Attention (LibTorch's
// scaled_dot_product_attention) brings together what it needs, in one of three ways.
#pragma once

#include "device_mesh/api.h"

namespace fsdp {

// How attention is computed whose queries and keys are cut along the sequence.
enum class SequenceAttention {
  // The one in which the busiest rank computes least; of equal ones, the one that sends
  // least: heads or rows, and rows in a ring where the keys and values of the whole
  // sequence would take more than twice the memory of a rank's queries and results.
  kCheapest,
  // Every rank takes some of the heads and the whole sequence: queries, keys and values
  // go there by an all-to-all, and results come back by one (DeepSpeed-Ulysses, Jacobs et
  // al., 2023). Ranks beyond the number of heads have nothing to compute.
  kHeads,
  // Keys and values are gathered; each rank keeps its rows of the queries, and computes
  // no block that a causal mask leaves out.
  kGathered,
  // The same rows, but keys and values go from rank to rank, and no rank has them all
  // (Liu et al., "Ring Attention", 2023). With a mask that is a tensor: as kGathered.
  kRing,
};

// Of the whole process; all ranks must set the same, between steps. Local.
FSDP_API void set_sequence_attention(SequenceAttention how);
[[nodiscard]] FSDP_API SequenceAttention sequence_attention();

}  // namespace fsdp
