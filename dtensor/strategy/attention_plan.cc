#include "dtensor/strategy/attention_plan.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

constexpr int64_t kBatch = 0, kHeads = 1, kSequence = 2, kWidth = 3;

int64_t size_of(const TensorLayout& layout, int64_t dim) {
  return layout.shape()[static_cast<size_t>(dim)];
}

// In how many parts mesh dimensions other than `m` cut the heads of the queries.
int64_t parts_of_heads(const TensorLayout& query, size_t m) {
  int64_t parts = 1;
  for (size_t other = 0; other < query.placements().size(); ++other) {
    if (other != m && query.placements()[other].is_shard(kHeads))
      parts *= query.mesh_shape()[other];
  }
  return parts;
}

template <class Visit>
bool any_of_the_three(const AttentionLayouts& layouts, size_t mesh_dim, const Visit& holds) {
  return holds(layouts.query.placements()[mesh_dim]) || holds(layouts.key.placements()[mesh_dim]) ||
         holds(layouts.value.placements()[mesh_dim]);
}

// In how many parts mesh dimensions other than `m` cut anything, as the operator counts
// them (OpSchema::parts).
int64_t other_parts(const AttentionLayouts& layouts, size_t m) {
  int64_t parts = 1;
  for (size_t other = 0; other < layouts.query.mesh_shape().size(); ++other) {
    const auto cuts = [](const Placement& placement) { return placement.is_shard(); };
    if (other != m && any_of_the_three(layouts, other, cuts))
      parts *= layouts.query.mesh_shape()[other];
  }
  return parts;
}

// Heads that a later mesh dimension cuts would be gathered before `m` can cut them, too.
bool heads_are_cut_after(const AttentionLayouts& layouts, size_t m) {
  for (size_t other = m + 1; other < layouts.query.mesh_shape().size(); ++other) {
    const auto cuts = [](const Placement& placement) { return placement.is_shard(kHeads); };
    if (any_of_the_three(layouts, other, cuts)) return true;
  }
  return false;
}

// Query-key pairs that the busiest rank computes, of one head and the whole batch that
// its mesh dimensions leave it, times all heads: numbers to compare two plans by.
struct Work {
  double pairs = 0;
  double sent = 0;  // elements
};

double pairs_of(const std::vector<Positions>& queries, const Positions& keys, bool is_causal) {
  double pairs = 0;
  for (const Positions& run : queries) {
    for (const AttentionBlock& block : blocks_of(run, keys, is_causal)) {
      const auto rows = static_cast<double>(block.query_end - block.query_begin);
      const auto columns = static_cast<double>(block.key_end - block.key_begin);
      pairs += block.is_triangle ? columns * (rows - (columns - 1) / 2) : rows * columns;
    }
  }
  return pairs;
}

std::vector<int64_t> at_place(const TensorLayout& layout, size_t m, int64_t place) {
  std::vector<int64_t> coordinate(layout.mesh_shape().size(), 0);
  coordinate[m] = place;
  return coordinate;
}

int64_t elements_of_row(const TensorLayout& layout) {
  return size_of(layout, kBatch) * size_of(layout, kHeads) * size_of(layout, kWidth);
}

// Each rank some rows of the queries, all heads.
Work by_rows(const AttentionLayouts& layouts, size_t m) {
  const Positions keys{.begin = 0, .end = size_of(layouts.key, kSequence)};
  const int64_t ranks = layouts.query.mesh_shape()[m];
  Work work;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto own = runs_of_part(layouts.query, kSequence, at_place(layouts.query, m, rank));
    work.pairs = std::max(work.pairs, pairs_of(own, keys, layouts.is_causal));
  }
  work.pairs *= static_cast<double>(size_of(layouts.query, kHeads));
  const auto share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  work.sent = share * static_cast<double>(size_of(layouts.key, kSequence)) *
              static_cast<double>(elements_of_row(layouts.key) + elements_of_row(layouts.value));
  return work;
}

// Each rank some heads, all rows.
Work by_heads(const AttentionLayouts& layouts, size_t m) {
  const int64_t ranks = layouts.query.mesh_shape()[m];
  const auto rows = size_of(layouts.query, kSequence);
  const Positions keys{.begin = 0, .end = size_of(layouts.key, kSequence)};
  const std::vector<Positions> all{{.begin = 0, .end = rows}};
  const int64_t cut = ranks * parts_of_heads(layouts.query, m);
  const int64_t heads = chunk_capacity(size_of(layouts.query, kHeads), cut) * cut / ranks;
  const auto share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const auto of_keys =
      static_cast<double>(keys.end) *
      static_cast<double>(elements_of_row(layouts.key) + elements_of_row(layouts.value));
  const auto of_queries =
      static_cast<double>(rows) * static_cast<double>(elements_of_row(layouts.query)) *
      (1 + static_cast<double>(size_of(layouts.value, kWidth)) /
               static_cast<double>(std::max<int64_t>(1, size_of(layouts.query, kWidth))));
  const double keys_cut = heads_can_be_cut(layouts, m) ? static_cast<double>(ranks) : 1;
  return {.pairs = pairs_of(all, keys, layouts.is_causal) * static_cast<double>(heads),
          .sent = share * (of_queries / static_cast<double>(ranks) + of_keys / keys_cut)};
}

// Whether the keys and values of the whole sequence take more than twice what a rank has
// of queries and results.
bool keys_are_many(const AttentionLayouts& layouts, size_t m) {
  const auto whole = size_of(layouts.key, kSequence) *
                     (elements_of_row(layouts.key) + elements_of_row(layouts.value));
  const auto own =
      chunk_capacity(size_of(layouts.query, kSequence), layouts.query.mesh_shape()[m]) * 2 *
      elements_of_row(layouts.query);
  return whole > 2 * own;
}

bool lie_alike(const TensorLayout& a, const TensorLayout& b, size_t m) {
  return a.placements()[m] == b.placements()[m] && size_of(a, kSequence) == size_of(b, kSequence);
}

bool can_be_a_ring(const AttentionLayouts& layouts, size_t m) {
  return !layouts.has_mask && lie_alike(layouts.query, layouts.key, m);
}

// Keys and values are either cut as the queries are, or whole.
bool heads_are_possible(const AttentionLayouts& layouts, size_t m) {
  return !heads_are_cut_after(layouts, m) &&
         (heads_can_be_cut(layouts, m) || !layouts.key.is_cut(kHeads));
}

}  // namespace

std::vector<Positions> runs_of_part(const TensorLayout& layout, int64_t dim,
                                    const std::vector<int64_t>& coordinate) {
  std::vector<Placement> cuts;
  for (const Placement& placement : layout.placements())
    cuts.push_back(placement.is_shard(dim) ? placement.along(0) : Placement(Replicate{}));
  std::vector<Positions> runs;
  for (const auto& [box, begin] :
       local_boxes({size_of(layout, dim)}, layout.mesh_shape(), cuts, coordinate)) {
    const Positions run{
        .begin = box[0].offset, .end = box[0].offset + box[0].length, .at = begin[0]};
    if (run.length() > 0) runs.push_back(run);
  }
  return runs;
}

std::vector<AttentionBlock> blocks_of(const Positions& queries, const Positions& keys,
                                      bool is_causal) {
  if (queries.length() == 0 || keys.length() == 0) return {};
  if (!is_causal) {
    return {{.query_begin = queries.begin,
             .query_end = queries.end,
             .key_begin = keys.begin,
             .key_end = keys.end}};
  }
  std::vector<AttentionBlock> blocks;
  const int64_t seen_by_all = std::min(keys.end, queries.begin);
  if (keys.begin < seen_by_all) {
    blocks.push_back({.query_begin = queries.begin,
                      .query_end = queries.end,
                      .key_begin = keys.begin,
                      .key_end = seen_by_all});
  }
  const int64_t begin = std::max(keys.begin, queries.begin);
  const int64_t end = std::min(keys.end, queries.end);
  if (begin < end) {
    blocks.push_back({.query_begin = begin,
                      .query_end = queries.end,
                      .key_begin = begin,
                      .key_end = end,
                      .is_triangle = true});
  }
  return blocks;
}

bool heads_can_be_cut(const AttentionLayouts& layouts, size_t m) {
  const int64_t heads = size_of(layouts.query, kHeads), groups = size_of(layouts.key, kHeads);
  if (heads == groups) return true;
  const int64_t parts = layouts.query.mesh_shape()[m] * other_parts(layouts, m);
  return heads % parts == 0 && groups % parts == 0;
}

SequenceAttention attention_plan(const AttentionLayouts& layouts, size_t m,
                                 SequenceAttention wanted) {
  using enum SequenceAttention;
  if (wanted == kHeads && heads_are_possible(layouts, m)) return kHeads;
  if (wanted == kRing) return can_be_a_ring(layouts, m) ? kRing : kGathered;
  if (wanted != kCheapest) return kGathered;
  if (heads_are_possible(layouts, m)) {
    const Work heads = by_heads(layouts, m), rows = by_rows(layouts, m);
    if (heads.pairs < rows.pairs || (heads.pairs == rows.pairs && heads.sent <= rows.sent))
      return kHeads;
  }
  return can_be_a_ring(layouts, m) && keys_are_many(layouts, m) ? kRing : kGathered;
}

}  // namespace fsdp::internal
