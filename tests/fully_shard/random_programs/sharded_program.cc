#include "tests/fully_shard/random_programs/sharded_program.h"

#include "fully_shard/deferred_init.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "tests/fully_shard/random_programs/program_optimizer.h"

#include <algorithm>
#include <utility>

namespace fsdp::testing {
namespace {

bool is_below(const Node& node, const std::vector<const Node*>& ancestors) {
  bool found = false;
  for (const auto* ancestor : ancestors) {
    for_each_node(*ancestor, [&](const Node& below) { found |= below.id == node.id; });
  }
  return found;
}

MixedPrecisionPolicy policy_of(const PrecisionSpec& precision) {
  MixedPrecisionPolicy policy;
  if (precision.param_dtype) policy.param_dtype = scalar_type(*precision.param_dtype);
  if (precision.reduce_dtype) policy.reduce_dtype = scalar_type(*precision.reduce_dtype);
  if (precision.buffer_dtype) policy.buffer_dtype = scalar_type(*precision.buffer_dtype);
  return policy;
}

// Whether no parameter has any.
bool is_without_values(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const auto& parameter) { return parameter.is_meta(); });
}

}  // namespace

// What is deferred gets its values last, under an optimizer that has its parameters.
ShardedProgram::ShardedProgram(const Program& program, const DeviceMesh& mesh,
                               const Prepare& prepare)
    : program_(program),
      mesh_(mesh),
      model_(program.deferred ? build_deferred(program) : build_model(program)) {
  model_.device = local_device(mesh);
  if (prepare) prepare(model_);
  if (program.sharded) shard(program.root);
  if (program.sharded && program.root.is_unit) shard_together({&program.root});
  set_prefetch_lists();
  optimizer_ = make_optimizer(program.optimizer, model_.module().parameters());
  started_without_values_ = is_without_values(model_.module());
  if (program.deferred) materialize(model_.module());
}

// Bottom-up, as fully_shard asks; siblings that join become one unit.
void ShardedProgram::shard(const Node& node) {
  for (const auto& child : node.children) shard(child);
  for (size_t i = 0; i < node.children.size(); ++i) {
    if (!node.children[i].is_unit) continue;
    std::vector<const Node*> together{&node.children[i]};
    while (i + 1 < node.children.size() && node.children[i + 1].joins_previous) {
      together.push_back(&node.children[++i]);
    }
    shard_together(together);
  }
}

void ShardedProgram::shard_together(const std::vector<const Node*>& nodes) {
  const auto& spec = nodes.front()->unit;
  FullyShardOptions options;
  if (spec.reshard_after_forward) options.reshard_after_forward = *spec.reshard_after_forward;
  if (spec.to_halves && shards_of(program_) == 4)
    options.reshard_after_forward = ReshardAfterForward::to_world(2);
  options.mp_policy = policy_of(spec.precision);
  options.gather_codec_fn = [precision = spec.precision](const auto&, const at::Tensor& tensor) {
    return codec_of(precision, tensor);
  };
  options.offload_policy.offload_to_cpu = spec.offload;
  options.outer = program_.outer;
  options.shard_placement_fn = [this](const std::string&, const at::Tensor& tensor) {
    return placement_of(tensor);
  };
  std::vector<torch::nn::Module*> modules;
  for (const auto* node : nodes) {
    modules.push_back(model_.blocks.at(node->id).get());
    for_each_node(*node, [&](const Node& below) { adopt(below, units_.size(), options); });
  }
  ShardedUnit unit{nodes, fully_shard(modules, mesh_, options)};
  for (const auto& [id, of_unit] : unit_of_tensor_) {
    if (of_unit == units_.size() && spec.precision.param_dtype)
      *model_.tensors.at(id).input_cast = InputCast::kByPolicy;
  }
  set_options(unit);
  const auto position = static_cast<int>(units_.size());
  for (auto& below : units_) {
    if (below.parent < 0 && is_below(*below.nodes.front(), nodes)) below.parent = position;
  }
  units_.push_back(std::move(unit));
}

void ShardedProgram::set_options(ShardedUnit& unit) const {
  const auto& spec = unit.nodes.front()->unit;
  auto& module = unit.module;
  if (!spec.reshard_after_backward) module.set_reshard_after_backward(false, /*recurse=*/false);
  if (!spec.unshard_in_backward) module.set_unshard_in_backward(false);
  if (spec.divide_factor != 0) module.set_gradient_divide_factor(spec.divide_factor);
  if (spec.custom_gather) unit.calls.count_gathers(module, mesh_);
  if (spec.custom_reduction) unit.calls.count_reductions(module, mesh_);
  if (program_.prefetch_after_gradients)
    module.set_backward_prefetch(BackwardPrefetch::kPost, /*recurse=*/false);
}

void ShardedProgram::adopt(const Node& node, size_t unit, FullyShardOptions& options) {
  for (const auto& param : node.params) {
    const auto& tensor = tensor_of(program_, param);
    if (tensor.ignored) {
      options.ignored_params.push_back(member(tensor.id));
    } else {
      unit_of_tensor_.emplace(tensor.id, unit);  // the first unit that sees it
    }
  }
}

std::optional<Placement> ShardedProgram::placement_of(const at::Tensor& tensor) const {
  for (const auto& [id, known] : model_.tensors) {
    if (!known.member.is_same(tensor)) continue;
    const auto& param = *find_param(program_, id);
    return placement_of_cut(param, tensor.size(sharded_dim(param)), shards_of(program_));
  }
  return std::nullopt;
}

void ShardedProgram::set_prefetch_lists() {
  for (auto& unit : units_) {
    const auto& spec = unit.nodes.front()->unit;
    if (!spec.forward_prefetch.empty())
      unit.module.set_modules_to_forward_prefetch(modules_of(spec.forward_prefetch));
    if (!spec.backward_prefetch.empty()) {
      unit.module.set_modules_to_backward_prefetch(modules_of(spec.backward_prefetch));
    }
  }
}

ShardedProgram::ShardedUnit* ShardedProgram::unit_of(int node_id) {
  for (auto& unit : units_) {
    for (const auto* node : unit.nodes) {
      if (node->id == node_id) return &unit;
    }
  }
  return nullptr;
}

std::vector<FSDPModule> ShardedProgram::modules_of(const std::vector<int>& node_ids) {
  std::vector<FSDPModule> modules;
  for (const int id : node_ids) {
    if (const auto* unit = unit_of(id)) modules.push_back(unit->module);
  }
  return modules;
}

std::map<int, UnitSpec> ShardedProgram::sharded_tensors() const {
  std::map<int, UnitSpec> sharded;
  for (const auto& [id, tensor] : model_.tensors) {
    const auto unit = unit_of_tensor_.find(id);
    if (unit != unit_of_tensor_.end()) {
      sharded.emplace(id, units_[unit->second].nodes.front()->unit);
    } else if (!program_.sharded) {
      sharded.emplace(id, UnitSpec{});
    }
  }
  return sharded;
}

int ShardedProgram::root_of(size_t unit) const {
  auto root = static_cast<int>(unit);
  while (units_[static_cast<size_t>(root)].parent >= 0)
    root = units_[static_cast<size_t>(root)].parent;
  return root;
}

// A backward that meets no unit of a root reduces nothing of it. Where it meets one that
// gets no gradient, both may be: then what happened is asked.
std::optional<Reduction> ShardedProgram::reduction_of(int id, const std::set<int>& arrived) const {
  if (!program_.sharded) return Reduction{};
  const auto found = unit_of_tensor_.find(id);
  if (found == unit_of_tensor_.end()) return std::nullopt;
  const auto& unit = units_[found->second];
  const auto root = root_of(found->second);
  const bool meets_root =
      std::any_of(unit_of_tensor_.begin(), unit_of_tensor_.end(), [&](const auto& other) {
        return root_of(other.second) == root && arrived.contains(other.first);
      });
  const auto& left = model_.tensors.at(id).member.grad();
  const bool waits = (left.defined() && !internal::is_untouched_tripwire(left)) ||
                     internal::unit_of(unit.module)->group()->gradients().keeps_gradients();
  const double factor = unit.nodes.front()->unit.divide_factor;
  const bool reduces = unit.synchronize && (unit.all_reduce || program_.replicas == 1);
  return Reduction{reduces && (meets_root || !waits),
                   factor != 0 ? factor : static_cast<double>(program_.world)};
}

void ShardedProgram::for_units(int node_id,
                               const std::function<void(ShardedUnit&, int position)>& visit) {
  for (size_t i = 0; i < units_.size(); ++i) {
    if (node_id < 0 || &units_[i] == unit_of(node_id)) visit(units_[i], static_cast<int>(i));
  }
}

void ShardedProgram::set_sync(int node_id, bool synchronize) {
  for_units(node_id, [&](ShardedUnit& unit, int position) {
    unit.synchronize = synchronize;
    if (oracle_) oracle_->model().set_synchronizes(position, synchronize);
    unit.module.set_requires_gradient_sync(synchronize, /*recurse=*/false);
  });
}

void ShardedProgram::set_all_reduce(int node_id, bool all_reduce) {
  const bool keeps_sums = !all_reduce && program_.replicas > 1;
  for_units(node_id, [&](ShardedUnit& unit, int position) {
    unit.all_reduce = all_reduce;
    if (oracle_) oracle_->model().set_keeps_sums(position, keeps_sums);
    unit.module.set_requires_all_reduce(all_reduce, /*recurse=*/false);
  });
}

void ShardedProgram::by_hand(const Action& action) {
  auto* unit = unit_of(action.target);
  if (unit == nullptr) return;
  if (action.kind == ActionKind::kUnshard) unit->module.unshard();
  if (action.kind == ActionKind::kUnshardAsync) unit->module.unshard_async();
  if (action.kind == ActionKind::kReshard) unit->module.reshard();
}

void ShardedProgram::reshard_all() {
  for (auto& unit : units_) unit.module.reshard();
}

void ShardedProgram::zero_pending_gradients() {
  for (auto& unit : units_) {
    unit.module.zero_pending_gradients(/*recurse=*/false);
    if (oracle_)
      oracle_->model().pending_gradients_dropped(static_cast<int>(&unit - units_.data()));
  }
}

void ShardedProgram::set_requires_grad(int id, bool requires_grad) {
  entry(id).set_requires_grad(requires_grad);
  const auto unit = unit_of_tensor_.find(id);
  if (oracle_ && unit != unit_of_tensor_.end())
    oracle_->model().set_trainable(static_cast<int>(unit->second), id, requires_grad);
}

}  // namespace fsdp::testing
