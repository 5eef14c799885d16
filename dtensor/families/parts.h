// Operators of which a way asks for more on a rank's parts than the operator itself:
// other arguments, or a word with the other ranks. Grouped by kind, one file each;
// parts.cc holds the table.
#pragma once

#include "dtensor/internal/run_by_ways.h"

#include <string>
#include <unordered_map>

namespace fsdp::internal {

struct OnParts {
  OperatorWays ways;
  RunOnParts run;
};

// By name without namespace, with the overload: "mean.dim".
using PartsTable = std::unordered_map<std::string, OnParts>;

// Null for none.
const OnParts* find_on_parts(const std::string& name);

void add_view_parts(PartsTable& table);
void add_reduction_parts(PartsTable& table);
void add_variance_parts(PartsTable& table);
void add_candidates_parts(PartsTable& table);
void add_attention_parts(PartsTable& table);
void add_softmax_parts(PartsTable& table);
void add_loss_parts(PartsTable& table);
void add_elementwise_loss_parts(PartsTable& table);
void add_embedding_parts(PartsTable& table);

}  // namespace fsdp::internal
