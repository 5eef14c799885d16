#include "dtensor/ops/op_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {

void OpTable::add(const std::string& name, OpEntry entry) {
  const bool is_new = entries_.emplace(name, std::move(entry)).second;
  TORCH_CHECK(is_new, "operator '", name, "' is registered twice");
}

void OpTable::add_with_in_place(const std::string& name, const OpEntry& entry) {
  auto in_place = name;
  in_place.insert(std::min(name.find('.'), name.size()), 1, '_');
  add(name, entry);
  add(in_place, entry);
}

void OpTable::add_unboxed(const std::string& name) {
  TORCH_CHECK(find(name) != nullptr, "operator '", name, "' has no entry");
  unboxed_.insert(name);
}

const OpEntry* OpTable::find(const std::string& name) const {
  auto found = entries_.find(name);
  if (found == entries_.end()) found = entries_.find(name.substr(0, name.find('.')));
  return found == entries_.end() ? nullptr : &found->second;
}

const OpTable& op_table() {
  static const auto* const table = [] {
    auto* const all = new OpTable;  // leaked: operators run until the process ends
    add_activations(*all);
    add_whole_dim(*all);
    add_attention(*all);
    add_cat(*all);
    add_convolution(*all);
    add_copy(*all);
    add_elementwise_loss(*all);
    add_embedding(*all);
    add_extrema(*all);
    add_factory(*all);
    add_foreach(*all);
    add_fused_optimizers(*all);
    add_host_values(*all);
    add_index(*all);
    add_matmul(*all);
    add_nll_loss(*all);
    add_norm(*all);
    add_normalization(*all);
    add_pointwise(*all);
    add_random(*all);
    add_reduction(*all);
    add_reshape(*all);
    add_softmax(*all);
    add_spatial(*all);
    add_variance(*all);
    add_view(*all);
    return all;
  }();
  return *table;
}

}  // namespace fsdp::internal
