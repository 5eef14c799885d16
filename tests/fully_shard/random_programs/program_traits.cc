#include "tests/fully_shard/random_programs/program_traits.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

namespace fsdp::testing {
namespace {

// Node ids of the units that hold each tensor: the first node of a joined unit stands for
// all.
void collect_holders(const Program& program, const Node& node, int unit,
                     std::map<int, std::vector<int>>& holders) {
  for (const auto& param : node.params) holders[tensor_of(program, param).id].push_back(unit);
  int joined = -1;
  for (const auto& child : node.children) {
    if (child.is_unit && !child.joins_previous) joined = child.id;
    collect_holders(program, child, child.is_unit ? joined : unit, holders);
  }
}

}  // namespace

int unit_depth(const Node& node) {
  int below = 0;
  for (const auto& child : node.children) below = std::max(below, unit_depth(child));
  return below + (node.is_unit ? 1 : 0);
}

bool has_tie(const Program& program, bool across_units) {
  std::map<int, std::vector<int>> holders;
  collect_holders(program, program.root, program.root.is_unit ? program.root.id : -1, holders);
  for (auto& [id, units] : holders) {
    if (units.size() < 2 || find_param(program, id)->ignored) continue;
    const bool differ = std::set(units.begin(), units.end()).size() > 1;
    if (differ == across_units) return true;
  }
  return false;
}

bool mixes_dtypes(const Node& node) {
  std::set<Dtype> dtypes;
  for (const auto& param : node.params) dtypes.insert(param.dtype);
  return node.is_unit && dtypes.size() > 1;
}

bool mixes_precisions(const Program& program) {
  std::vector<PrecisionSpec> precisions;
  for_each_node(program.root, [&precisions](const Node& node) {
    if (node.is_unit && !node.joins_previous) precisions.push_back(node.unit.precision);
  });
  return std::any_of(precisions.begin(), precisions.end(),
                     [&](const PrecisionSpec& other) { return other != precisions.front(); });
}

bool has_prefetch_lists(const Program& program) {
  bool has = false;
  for_each_node(program.root, [&has](const Node& node) {
    has |= !node.unit.forward_prefetch.empty() || !node.unit.backward_prefetch.empty();
  });
  return has;
}

// A gradient is left where the parameter has one before the next backward.
bool accumulates_over_steps(const Program& program) {
  bool has_gradient = false;
  for (const auto& action : program.actions) {
    if (runs_backward(action.kind)) {
      if (has_gradient) return true;
      has_gradient = true;
    } else if (action.kind == ActionKind::kZeroGrad ||
               action.kind == ActionKind::kThrowInBackward) {
      has_gradient = false;
    }
  }
  return false;
}

bool accumulates_without_sync(const Program& program) {
  bool pending = false, off = false;
  for (const auto& action : program.actions) {
    if (action.kind == ActionKind::kSetSync) off = !action.flag;
    if (!runs_backward(action.kind)) continue;
    if (!off && pending) return true;
    pending |= off;
  }
  return false;
}

bool computes_without_gradients(const Program& program) {
  bool computes =
      std::any_of(program.actions.begin(), program.actions.end(), [](const Action& action) {
        return action.kind == ActionKind::kEvaluate || action.kind == ActionKind::kInference ||
               action.kind == ActionKind::kEvaluateBeforeBackward;
      });
  for_each_node(program.root, [&](const Node& node) { computes |= node.no_grad; });
  return computes;
}

bool reads_entry_alone(const ParamSpec& param) {
  const bool has_it_alone =
      param.use == Use::kGain || param.use == Use::kMasked || param.use == Use::kNoGrad;
  return param.penalised || (param.in_list && has_it_alone);
}

bool freezes_later(const Program& program, ActionKind kind, bool frozen_before) {
  bool trained = false, changed = false;
  for (const auto& action : program.actions) {
    if (runs_backward(action.kind)) {
      if (changed) return true;
      trained = true;
    }
    const auto* param = action.kind == kind ? find_param(program, action.target) : nullptr;
    if (param == nullptr || !trained) continue;
    const auto& tensor = tensor_of(program, *param);
    changed |= !tensor.anchor && tensor.frozen == frozen_before;
  }
  return false;
}

}  // namespace fsdp::testing
