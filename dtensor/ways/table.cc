#include "dtensor/ways/table.h"

namespace fsdp::internal {

const WaysTable& ways_table() {
  static const auto* const table = [] {
    auto* const ways = new WaysTable;
    add_pointwise_ways(*ways);
    add_view_ways(*ways);
    add_reshape_ways(*ways);
    add_reduction_ways(*ways);
    add_join_ways(*ways);
    add_index_ways(*ways);
    add_copy_ways(*ways);
    add_product_ways(*ways);
    add_embedding_ways(*ways);
    add_layer_norm_ways(*ways);
    add_along_ways(*ways);
    add_loss_ways(*ways);
    add_elementwise_loss_ways(*ways);
    add_activation_ways(*ways);
    add_glu_ways(*ways);
    add_batch_norm_ways(*ways);
    add_group_norm_ways(*ways);
    add_spatial_ways(*ways);
    add_attention_ways(*ways);
    add_convolution_ways(*ways);
    return ways;
  }();
  return *table;
}

const OperatorWays* find_ways(const std::string& name) {
  const auto& table = ways_table();
  auto found = table.find(name);
  if (found == table.end()) found = table.find(name.substr(0, name.find('.')));
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace fsdp::internal
