#include "dtensor/families/rules.h"

#include "dtensor/internal/run_on_whole.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

const RuleTable& table() {
  static const auto* const rules = [] {
    auto* const table = new RuleTable;
    add_pointwise_rules(*table);
    add_log_sigmoid_rules(*table);
    add_foreach_rules(*table);
    add_copy_rules(*table);
    add_factory_rules(*table);
    add_random_rules(*table);
    add_norm_rules(*table);
    add_foreach_norm_rules(*table);
    add_view_rules(*table);
    add_view_in_place_rules(*table);
    add_value_rules(*table);
    add_scatter_rules(*table);
    add_fused_rules(*table);
    add_loss_rules(*table);
    add_attention_rules(*table);
    return table;
  }();
  return *rules;
}

Rule find(const std::string& name) {
  const auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

}  // namespace

void add_with_in_place(RuleTable& table, const std::string& name, Rule rule) {
  table[name] = rule;
  auto in_place = name;
  in_place.insert(std::min(name.find('.'), name.size()), 1, '_');
  table[in_place] = rule;
}

Rule special_rule_of(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0) return nullptr;
  const std::string base = name.name.substr(6);
  if (Rule exact = find(base + "." + name.overload_name)) return exact;
  return find(base);
}

Rule rule_of(const c10::OperatorName& name) {
  const Rule special = special_rule_of(name);
  return special != nullptr ? special : no_rule;
}

void no_rule(OperatorCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.traits().draws_random_numbers, "No sharding rule for ", call.description(),
      ", which draws random numbers. Work on the whole value with fsdp::DTensor(t).full_tensor() "
      "or .redistribute({Replicate()}) (both collective), or on this rank's part with "
      ".to_local(), and wrap the result with fsdp::from_local or fsdp::distribute_tensor.");
  run_on_whole(call);
}

void decompose_rule(OperatorCall& call) { call.decompose(); }

}  // namespace fsdp::internal
