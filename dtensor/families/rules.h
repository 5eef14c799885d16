// Which rule runs which operator on DTensors. Rules are grouped by kind, one file each;
// rules.cc holds the table.
#pragma once

#include "dtensor/internal/dispatch.h"

#include <ATen/core/operator_name.h>

#include <string>
#include <unordered_map>

namespace fsdp::internal {

// The rule made for this operator, or null.
Rule special_rule_of(const c10::OperatorName& name);
// The same, or no_rule.
Rule rule_of(const c10::OperatorName& name);

// For operators without a rule or ways: they run on the whole (run_on_whole.h). Throws
// NotImplementedError that names the operator, the placements and what to do for one that
// draws random numbers.
void no_rule(OperatorCall& call);
// The operator's composite kernel does it, with operators that have rules.
void decompose_rule(OperatorCall& call);

// Rules by name without namespace: "add.Tensor", or "add" for every overload, "sum." for
// the overload without a name.
using RuleTable = std::unordered_map<std::string, Rule>;
// Under `name` and under its in-place form, "add.Tensor" and "add_.Tensor".
void add_with_in_place(RuleTable& table, const std::string& name, Rule rule);

void add_pointwise_rules(RuleTable& table);
void add_log_sigmoid_rules(RuleTable& table);
void add_foreach_rules(RuleTable& table);
void add_copy_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);
void add_random_rules(RuleTable& table);
void add_norm_rules(RuleTable& table);
void add_foreach_norm_rules(RuleTable& table);
void add_view_rules(RuleTable& table);
void add_view_in_place_rules(RuleTable& table);
void add_value_rules(RuleTable& table);
void add_scatter_rules(RuleTable& table);
void add_fused_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_attention_rules(RuleTable& table);

}  // namespace fsdp::internal
