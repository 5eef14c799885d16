#include "fully_shard/auto_shard.h"

#include "device_mesh/module_ref.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/shard_placement.h"
#include "fully_shard/units/shared_storage.h"
#include "fully_shard/units/validation.h"
#include "fully_shard/wrap_policy.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>

#include <algorithm>
#include <ostream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp {
namespace {

using internal::ErrorContext;
using internal::ModuleTree;

// Not handles: a parameter's are counted when it is sharded (check_members_are_held()).
using ParamSet = std::unordered_set<const c10::TensorImpl*>;

struct Choice {
  torch::nn::Module* module;
  std::string path;
  int64_t numel;
  FullyShardOptions options;
};

std::string display_name(const std::string& path) { return path.empty() ? "(root)" : path; }

std::string describe(const torch::nn::Module& module, const std::string& path) {
  return "module '" + display_name(path) + "' (" + internal::module_type_name(module) + ")";
}

// The distinct parameters at and below a module.
ParamSet params_below(torch::nn::Module& module) {
  ParamSet params;
  const ModuleTree tree({&module});
  for (size_t i = 0; i < tree.size(); ++i) {
    internal::for_each_registered(tree.module(i),
                                  [&](const std::string&, const at::Tensor& tensor) {
                                    if (tensor.defined())
                                      params.insert(tensor.unsafeGetTensorImpl());
                                  });
  }
  return params;
}

void refuse_units(torch::nn::Module& root, const ErrorContext& context) {
  const ModuleTree tree({&root});
  for (size_t i = 0; i < tree.size(); ++i) {
    TORCH_CHECK_VALUE(tree.unit(i) == nullptr, context.caller, ": ",
                      describe(tree.module(i), tree.path(i)),
                      " is a unit already; allowed is a model without units. Let the policy choose "
                      "this one as well, or apply fully_shard by hand throughout",
                      context.rank);
  }
}

// Asks the policy about a tree, once, and notes what it chooses. Changes nothing.
class Planner {
 public:
  Planner(const WrapPolicy& policy, const FullyShardOptions& options, const ErrorContext& context)
      : policy_(policy), options_(options), context_(context) {
    for (const auto& tensor : options.ignored_params) ignored_.insert(tensor.unsafeGetTensorImpl());
  }

  std::vector<Choice> plan(torch::nn::Module& root) {
    refuse_units(root, context_);
    visited_.insert(&root);
    if (policy_.looks_below(root, numel_left(params_below(root)))) visit_children(root, "");
    take(root, "", options_);
    return std::move(choices_);
  }

 private:
  void visit_children(torch::nn::Module& module, const std::string& path) {
    for (const auto& child : module.named_children()) {
      if (!visited_.insert(child.value().get()).second) continue;
      visit(*child.value(), path.empty() ? child.key() : path + "." + child.key());
    }
  }

  void visit(torch::nn::Module& module, const std::string& path) {
    const auto params = params_below(module);
    if (is_ignored(params)) return;
    if (!policy_.looks_below(module, numel_left(params))) return;
    visit_children(module, path);
    const auto inherited = inherited_by(params);
    auto chosen = policy_.choose(module, numel_left(params), inherited);
    if (!chosen) return;
    add_ignored(*chosen, inherited.ignored_params);
    take(module, path, std::move(*chosen));
  }

  bool is_ignored(const ParamSet& params) const {
    return !params.empty() &&
           std::ranges::all_of(params, [&](auto* param) { return ignored_.contains(param); });
  }

  int64_t numel_left(const ParamSet& params) const {
    int64_t numel = 0;
    for (const auto* param : params) {
      if (!ignored_.contains(param) && !taken_.contains(param)) numel += param->numel();
    }
    return numel;
  }

  // fully_shard takes no ignored parameter that the unit does not have.
  FullyShardOptions inherited_by(const ParamSet& params) const {
    auto inherited = options_;
    std::erase_if(inherited.ignored_params, [&](const at::Tensor& tensor) {
      return !params.contains(tensor.unsafeGetTensorImpl());
    });
    return inherited;
  }

  static void add_ignored(FullyShardOptions& options, const std::vector<at::Tensor>& inherited) {
    auto& ignored = options.ignored_params;
    ParamSet known;
    for (const auto& tensor : ignored) known.insert(tensor.unsafeGetTensorImpl());
    for (const auto& tensor : inherited) {
      if (known.insert(tensor.unsafeGetTensorImpl()).second) ignored.push_back(tensor);
    }
  }

  void take(torch::nn::Module& module, const std::string& path, FullyShardOptions options) {
    TORCH_CHECK_VALUE(!internal::is_container_without_forward(module), context_.caller, ": ",
                      describe(module, path),
                      " is a container without forward, and cannot be a unit; choose its elements, "
                      "or the module around it",
                      context_.rank);
    auto params = params_below(module);
    auto managed = params;
    for (const auto& tensor : options.ignored_params) managed.erase(tensor.unsafeGetTensorImpl());
    own(module, path);
    options.shard_placement_fn = internal::asking_once(std::move(options.shard_placement_fn));
    options.gather_codec_fn = internal::asking_once(std::move(options.gather_codec_fn));
    choices_.push_back({&module, path, numel_left(managed), std::move(options)});
    taken_.merge(params);
    chosen_.insert(&module);
  }

  // Notes the modules that the unit manages: those below it that no deeper unit has. One
  // that is below two units, since it is shared, can be in neither.
  void own(torch::nn::Module& unit, const std::string& path) {
    std::vector<torch::nn::Module*> waiting = {&unit};
    while (!waiting.empty()) {
      auto& module = *waiting.back();
      waiting.pop_back();
      if (chosen_.contains(&module)) continue;
      const auto [owner, is_new] = owners_.try_emplace(&module, path);
      if (owner->second != path)
        refuse_second_owner(module, owner->second, path);
      else if (!is_new)
        continue;
      for (const auto& child : module.children()) waiting.push_back(child.get());
    }
  }

  void refuse_second_owner(torch::nn::Module& module, const std::string& first,
                           const std::string& second) const {
    internal::for_each_registered(module, [&](const std::string& key, const at::Tensor& tensor) {
      TORCH_CHECK_VALUE(!tensor.defined() || ignored_.contains(tensor.unsafeGetTensorImpl()),
                        context_.caller, ": parameter '", key, "' of a shared module (",
                        internal::module_type_name(module), ") would be in unit '",
                        display_name(first), "' and in unit '", display_name(second),
                        "'; let the policy choose the shared module as well", context_.rank);
    });
  }

  const WrapPolicy& policy_;
  const FullyShardOptions& options_;
  const ErrorContext& context_;
  ParamSet ignored_;
  ParamSet taken_;  // by the units chosen so far
  std::unordered_set<const torch::nn::Module*> visited_, chosen_;
  std::unordered_map<const torch::nn::Module*, std::string> owners_;  // paths of units
  std::vector<Choice> choices_;
};

// Whether fully_shard would take the unit once those before it, whose parameters are
// `passed_over`, are made.
void validate_unit(const Choice& unit, const internal::StorageUsers& users, const DeviceMesh& mesh,
                   std::vector<at::Tensor>& passed_over) {
  const std::vector<torch::nn::Module*> modules = {unit.module};
  internal::validate_request(modules, mesh, unit.options);
  internal::resolve_reshard_after_forward("auto_shard", unit.options.reshard_after_forward, mesh);
  const auto& ignored = unit.options.ignored_params;
  passed_over.insert(passed_over.end(), ignored.begin(), ignored.end());
  auto managed = internal::find_managed(modules, passed_over);
  internal::validate_parameters(modules, managed, users, mesh, unit.options);
  const ErrorContext context{"auto_shard", c10::str(" (rank ", mesh.rank(), ")")};
  internal::place_parameters(managed, internal::ranks_that_shard(mesh), unit.options, context);
  internal::choose_codecs(managed, unit.options, context);
  for (const auto& param : managed.params) passed_over.push_back(param.tensor);
}

void validate_units(torch::nn::Module& root, const std::vector<Choice>& units,
                    const DeviceMesh& mesh) {
  const internal::StorageUsers users({&root});
  std::vector<at::Tensor> passed_over;
  for (const auto& unit : units) {
    try {
      validate_unit(unit, users, mesh, passed_over);
    } catch (c10::Error& error) {
      error.add_context("auto_shard would make " + describe(*unit.module, unit.path) + " a unit");
      throw;
    }
  }
}

// Places the parameters of units in the order in which they are made, over `ranks` ranks.
class PlacementPlanner {
 public:
  PlacementPlanner(int64_t ranks, const ErrorContext& context) : ranks_(ranks), context_(context) {}

  // Of those that are not cut as Shard(0).
  std::vector<PlannedPlacement> next(const Choice& unit) {
    const auto& ignored = unit.options.ignored_params;
    passed_over_.insert(passed_over_.end(), ignored.begin(), ignored.end());
    auto managed = internal::find_managed({unit.module}, passed_over_);
    internal::place_parameters(managed, ranks_, unit.options, context_);
    internal::plan_owners(managed, ranks_, owned_bytes_);
    std::vector<PlannedPlacement> placements;
    for (const auto& param : managed.params) {
      if (param.cut != Shard{0}) placements.push_back({param.path, param.cut});
      passed_over_.push_back(param.tensor);
    }
    return placements;
  }

 private:
  int64_t ranks_;
  const ErrorContext& context_;
  std::vector<at::Tensor> passed_over_;  // those of the units before
  std::vector<int64_t> owned_bytes_;
};

bool always_looks_below(torch::nn::Module&, int64_t) { return true; }

template <class Function>
Function not_empty(const char* caller, Function function) {
  TORCH_CHECK_VALUE(function != nullptr, caller,
                    ": the function is empty; give one that can be called");
  return function;
}

}  // namespace

UnitPlan plan_units(ModuleRef root, const WrapPolicy& policy, const FullyShardOptions& options,
                    std::optional<int64_t> ranks) {
  const ErrorContext context{"plan_units", ""};
  TORCH_CHECK_VALUE(!ranks || *ranks > 0, "plan_units: ranks is ", *ranks, ", expected 1 or more");
  auto choices = Planner(policy, options, context).plan(internal::given_module("plan_units", root));
  UnitPlan plan;
  for (const auto& unit : choices)
    plan.units.push_back({unit.path, internal::module_type_name(*unit.module), unit.numel});
  if (!ranks) return plan;
  PlacementPlanner planner(*ranks, context);
  for (size_t i = 0; i < choices.size(); ++i) plan.units[i].placements = planner.next(choices[i]);
  return plan;
}

FSDPModule auto_shard(ModuleRef root, const WrapPolicy& policy, const DeviceMesh& mesh,
                      FullyShardOptions options) {
  auto& whole = internal::given_module("auto_shard", root);
  const ErrorContext context{"auto_shard", c10::str(" (rank ", mesh.rank(), ")")};
  auto units = Planner(policy, options, context).plan(whole);
  validate_units(whole, units, mesh);
  for (auto& unit : units) {
    internal::separate_from_others(*unit.module);  // slices of one storage of the whole model
    fully_shard(*unit.module, mesh, std::move(unit.options));
  }
  return get_fsdp_module(whole);
}

WrapPolicy::WrapPolicy(LooksBelow looks_below, Choose choose)
    : looks_below_(not_empty("WrapPolicy", std::move(looks_below))),
      choose_(not_empty("WrapPolicy", std::move(choose))) {}

WrapPolicy::WrapPolicy(Ask ask) {
  not_empty("WrapPolicy", ask);
  looks_below_ = [ask](torch::nn::Module& module, int64_t numel_left) {
    return ask(module, /*recurse=*/true, numel_left);
  };
  choose_ = [ask](torch::nn::Module& module, int64_t numel_left,
                  const FullyShardOptions& root_options) {
    return ask(module, /*recurse=*/false, numel_left) ? std::optional(root_options) : std::nullopt;
  };
}

bool WrapPolicy::looks_below(torch::nn::Module& module, int64_t numel_left) const {
  return looks_below_(module, numel_left);
}

std::optional<FullyShardOptions> WrapPolicy::choose(torch::nn::Module& module, int64_t numel_left,
                                                    const FullyShardOptions& root_options) const {
  return choose_(module, numel_left, root_options);
}

bool WrapPolicy::operator()(torch::nn::Module& module, bool recurse, int64_t numel_left) const {
  return recurse ? looks_below(module, numel_left) : choose(module, numel_left, {}).has_value();
}

WrapPolicy by_fn(std::function<bool(torch::nn::Module&)> is_unit) {
  not_empty("by_fn", is_unit);
  return WrapPolicy([is_unit](torch::nn::Module& module, bool recurse, int64_t) {
    return recurse || is_unit(module);
  });
}

WrapPolicy by_fn(
    std::function<std::optional<FullyShardOptions>(torch::nn::Module&, FullyShardOptions)>
        options_of) {
  not_empty("by_fn", options_of);
  return WrapPolicy(always_looks_below, [options_of](torch::nn::Module& module, int64_t,
                                                     const FullyShardOptions& root_options) {
    return options_of(module, root_options);
  });
}

WrapPolicy by_size(int64_t min_numel) {
  TORCH_CHECK_VALUE(min_numel >= 1, "by_size: min_numel is ", min_numel, "; allowed: 1 and more");
  return WrapPolicy([min_numel](torch::nn::Module& module, bool recurse, int64_t numel_left) {
    if (numel_left < min_numel) return false;
    return recurse ? !internal::is_a<torch::nn::MultiheadAttention>(module)
                   : !internal::is_container_without_forward(module);
  });
}

WrapPolicy every_module() {
  return by_fn(
      [](torch::nn::Module& module) { return !internal::is_container_without_forward(module); });
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the lambda keeps a copy
WrapPolicy by_any(std::vector<WrapPolicy> policies) {
  TORCH_CHECK_VALUE(!policies.empty(), "by_any: the list of policies is empty");
  const auto looks_below = [policies](torch::nn::Module& module, int64_t numel_left) {
    return std::any_of(policies.begin(), policies.end(), [&](const WrapPolicy& policy) {
      return policy.looks_below(module, numel_left);
    });
  };
  const auto choose = [policies](torch::nn::Module& module, int64_t numel_left,
                                 const FullyShardOptions& root_options) {
    std::optional<FullyShardOptions> chosen;
    for (const auto& policy : policies) {
      if (!chosen) chosen = policy.choose(module, numel_left, root_options);
    }
    return chosen;
  };
  return WrapPolicy(looks_below, choose);
}

std::string to_string(const UnitPlan& plan) {
  std::string text;
  for (const auto& unit : plan.units) {
    text += (unit.path.empty() ? "(root)" : unit.path) + ": " + unit.type + ", " +
            std::to_string(unit.numel) + " elements\n";
    for (const auto& [parameter, placement] : unit.placements)
      text += "  " + parameter + ": " + to_string(placement) + "\n";
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const UnitPlan& plan) { return out << to_string(plan); }

}  // namespace fsdp
