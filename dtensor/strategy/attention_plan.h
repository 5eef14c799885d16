// Which rows and keys of a causal attention a rank computes whose sequence is cut, and
// how attention is divided over ranks. No torch here.
#pragma once

#include "dtensor/context_parallel.h"
#include "dtensor/layout/tensor_layout.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Positions [begin, end) of a sequence, which stand one behind the other from `at` on in
// a rank's part.
struct Positions {
  int64_t begin = 0, end = 0;
  int64_t at = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const Positions&) const = default;
};

// What the rank at `coordinate` has of dimension `dim`, in the order of its part; no
// empty ones.
std::vector<Positions> runs_of_part(const TensorLayout& layout, int64_t dim,
                                    const std::vector<int64_t>& coordinate);

// One call of an attention kernel: queries and keys, as positions of their sequences. In
// a triangle query i, counted from the first of the block, sees its keys 0 to i.
struct AttentionBlock {
  int64_t query_begin = 0, query_end = 0;
  int64_t key_begin = 0, key_end = 0;
  bool is_triangle = false;

  bool operator==(const AttentionBlock&) const = default;
};

// What queries of a run see of the keys of another: a rectangle, a triangle, both or
// nothing. Where `is_causal`, query i sees keys 0 to i.
std::vector<AttentionBlock> blocks_of(const Positions& queries, const Positions& keys,
                                      bool is_causal);

struct AttentionLayouts {
  TensorLayout query, key, value;  // [batch, heads, sequence, width] each
  bool is_causal = false;
  bool has_mask = false;
};

// How the ranks of mesh dimension `m`, which cuts the sequence of the keys, are to
// compute attention: `wanted`, or what it says that is cheapest. Never kCheapest.
SequenceAttention attention_plan(const AttentionLayouts& layouts, size_t m,
                                 SequenceAttention wanted);

// Whether heads can be cut over mesh dimension `m` beside what other ones cut, so that
// every query finds its keys on its rank.
bool heads_can_be_cut(const AttentionLayouts& layouts, size_t m);

}  // namespace fsdp::internal
