// Which operators run by ways. Grouped by kind, one file each. No torch here.
#pragma once

#include "dtensor/ways/operator_ways.h"

#include <string>
#include <unordered_map>

namespace fsdp::internal {

// By name without namespace: "mm." for the overload without a name, "softmax.int", or
// "add" for every overload that has no entry of its own.
using WaysTable = std::unordered_map<std::string, OperatorWays>;

const WaysTable& ways_table();
// Null for none. `name` as in the table, with its overload.
const OperatorWays* find_ways(const std::string& name);

void add_pointwise_ways(WaysTable& table);
void add_view_ways(WaysTable& table);
void add_reshape_ways(WaysTable& table);
void add_reduction_ways(WaysTable& table);
void add_join_ways(WaysTable& table);
void add_index_ways(WaysTable& table);
void add_copy_ways(WaysTable& table);
void add_product_ways(WaysTable& table);
void add_embedding_ways(WaysTable& table);
void add_layer_norm_ways(WaysTable& table);
void add_along_ways(WaysTable& table);
void add_loss_ways(WaysTable& table);
void add_elementwise_loss_ways(WaysTable& table);
void add_activation_ways(WaysTable& table);
void add_glu_ways(WaysTable& table);
void add_batch_norm_ways(WaysTable& table);
void add_group_norm_ways(WaysTable& table);
void add_spatial_ways(WaysTable& table);
void add_attention_ways(WaysTable& table);
void add_convolution_ways(WaysTable& table);

}  // namespace fsdp::internal
