// Attention on a rank's part of a sequence (context parallelism): its rows of the
// queries, while the keys and values come from all ranks of the mesh dimensions that cut
// them, gathered or in a ring. (Heads instead of rows: kernels/composites.cc.)
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/run_by_strategy.h"
#include "dtensor/strategy/attention_plan.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <optional>
#include <vector>

namespace fsdp::internal {

// Of queries, keys and values: [batch, heads, sequence, width].
inline constexpr int64_t kAttentionHeads = 1, kAttentionSequence = 2, kAttentionNdim = 4;

// The mesh dimension of more than one rank that cuts the sequence of `key`; none where
// none or several do.
std::optional<size_t> dim_of_sequence(const DTensorSpec& key);

// An operator that got this rank's parts of a query, a key and a value that lie so, where
// a dimension of the mesh cuts the sequence of one of them.
struct SequenceCall {
  OperatorCall& call;
  DTensorSpec query, key, value;
  // Which head of the keys each of this rank's queries attends to; undefined where the
  // kernel knows.
  at::Tensor groups;
};

// Both are collective over the mesh dimensions that cut the sequence of the key.

// _scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal,
// attn_mask, scale) -> result, logsumexp
std::vector<c10::IValue> attention_over_sequence(const SequenceCall& of);
// ..._backward(grad, query, key, value, result, logsumexp, dropout_p, is_causal,
// attn_mask, scale) -> gradients of query, key and value; those of keys and values that
// came whole are terms.
std::vector<c10::IValue> attention_over_sequence_backward(const SequenceCall& of);

}  // namespace fsdp::internal
