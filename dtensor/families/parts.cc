#include "dtensor/families/parts.h"

namespace fsdp::internal {

const OnParts* find_on_parts(const std::string& name) {
  static const auto* const parts = [] {
    auto* const table = new PartsTable;
    add_view_parts(*table);
    add_reduction_parts(*table);
    add_variance_parts(*table);
    add_candidates_parts(*table);
    add_attention_parts(*table);
    add_softmax_parts(*table);
    add_loss_parts(*table);
    add_elementwise_loss_parts(*table);
    add_embedding_parts(*table);
    return table;
  }();
  const auto found = parts->find(name);
  return found == parts->end() ? nullptr : &found->second;
}

}  // namespace fsdp::internal
