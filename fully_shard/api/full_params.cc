#include "fully_shard/full_params.h"

#include "device_mesh/internal/given_module.h"
#include "dtensor/dtensor.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/params/summoned_units.h"
#include "fully_shard/summon_full_params.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using internal::FSDPParamGroup;
using GroupPtr = c10::intrusive_ptr<FSDPParamGroup>;

// Keeps one group unsharded, and has the gather of the next one in flight.
class Window {
 public:
  Window(const GroupPtr& group, FSDPParamGroup* next) : group_(group) {
    if (!group_) return;
    internal::hold(*group_);
    if (next != nullptr && !internal::any_is_cast(next->params())) internal::unshard_async(*next);
  }
  ~Window() {
    if (group_) internal::release(*group_);
  }
  Window(const Window&) = delete;

 private:
  GroupPtr group_;
};

struct NamedParam {
  std::string name;
  at::Tensor value;
  GroupPtr group;  // null for a plain tensor
};

std::vector<NamedParam> find_params(torch::nn::Module& module) {
  std::vector<NamedParam> params;
  const internal::ModuleTree tree({&module});
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const auto& slot : internal::slots_of(tree.module(i))) {
      const auto& value = internal::registered(slot);
      if (!value.defined()) continue;
      params.push_back(
          {tree.path_of(i, slot.key), value, internal::find_managed_tensor(value).group});
    }
  }
  return params;
}

// In the parameter's own dtype. Collective where members have another one.
at::Tensor full_value(const at::Tensor& registered, bool casts) {
  const auto* entry = internal::RegistryEntry::of(registered);
  if (entry == nullptr) return registered;
  return casts ? DTensor(registered).full_tensor() : entry->member().detach();
}

// The units around the module that is being visited, outermost first, full.
class OpenUnits {
 public:
  // Closes what does not enclose `unit`, then opens it; null: closes all.
  void enter(const std::shared_ptr<internal::Unit>& unit) {
    while (!open_.empty() && !encloses(*open_.back().unit, unit)) open_.pop_back();
    if (!unit || (!open_.empty() && open_.back().unit == unit)) return;
    open_.push_back({unit, std::make_unique<SummonFullParams>(internal::handle_of(unit),
                                                              SummonOptions{.recurse = false})});
  }
  OpenUnits() = default;
  OpenUnits(const OpenUnits&) = delete;
  ~OpenUnits() {
    while (!open_.empty()) open_.pop_back();
  }

 private:
  struct Open {
    std::shared_ptr<internal::Unit> unit;
    std::unique_ptr<SummonFullParams> full;
  };
  static bool encloses(const internal::Unit& open, const std::shared_ptr<internal::Unit>& unit) {
    return unit && (&open == unit.get() || open.is_ancestor_of(*unit));
  }

  std::vector<Open> open_;
};

}  // namespace

void for_each_full_param(
    ConstModuleRef module,
    const std::function<void(const std::string& name, const at::Tensor& value)>& visit) {
  const auto& root = internal::given_module("for_each_full_param", module);
  const auto params = find_params(const_cast<torch::nn::Module&>(root));
  for (size_t begin = 0, end = 0; begin < params.size(); begin = end) {
    const auto& group = params[begin].group;
    while (end < params.size() && params[end].group == group) ++end;
    const c10::NoGradGuard no_grad;
    const bool casts = group && internal::any_is_cast(group->params());
    const Window window(casts ? GroupPtr() : group,
                        end < params.size() ? params[end].group.get() : nullptr);
    for (size_t i = begin; i < end; ++i) visit(params[i].name, full_value(params[i].value, casts));
  }
}

void apply_unsharded(ModuleRef module, const std::function<void(torch::nn::Module&)>& function) {
  auto& root = internal::given_module("apply_unsharded", module);
  const internal::ModuleTree tree({&root});
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<internal::Unit>> units;
  for (size_t i = 0; i < tree.size(); ++i) {
    const auto unit = tree.nearest_unit(i);
    if (unit) internal::check_not_summoned(*unit, "apply_unsharded");
    units.emplace(&tree.module(i), unit);
  }
  OpenUnits open;
  root.apply([&](torch::nn::Module& each) {
    open.enter(units.at(&each));
    function(each);
  });
}

}  // namespace fsdp
