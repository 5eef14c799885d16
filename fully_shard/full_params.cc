#include "fully_shard/full_params.h"

#include "fully_shard/params/registry_entry.h"
#include "fully_shard/summon_full_params.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_table.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using internal::ParamGroup;
using Group = c10::intrusive_ptr<ParamGroup>;

// Keeps one group unsharded, and has the gather of the next one in flight.
class Window {
 public:
  Window(const Group& group, ParamGroup* next) : group_(group) {
    if (!group_) return;
    group_->hold();
    if (next != nullptr) next->issue_all_gather();
  }
  ~Window() {
    if (group_) group_->release();
  }
  Window(const Window&) = delete;

 private:
  Group group_;
};

struct NamedParam {
  std::string name;
  at::Tensor value;
  Group group;  // null for a plain tensor
};

std::vector<NamedParam> find_params(const torch::nn::Module& module) {
  std::vector<NamedParam> params;
  std::unordered_set<const torch::nn::Module*> visited;
  const std::function<void(const torch::nn::Module&, const std::string&)> walk =
      [&](const auto& below, const auto& path) {
        if (!visited.insert(&below).second) return;
        for (const auto& item : below.named_parameters(/*recurse=*/false)) {
          params.push_back(
              {path + item.key(), item.value(), internal::find_managed_tensor(item.value()).group});
        }
        for (const auto& child : below.named_children())
          walk(*child.value(), path + child.key() + ".");
      };
  walk(module, "");
  return params;
}

// The modules at and below `module` by nearest unit, units and modules in pre-order;
// outside any unit: null.
struct UnitModules {
  std::shared_ptr<internal::Unit> unit;
  std::vector<torch::nn::Module*> modules;
};

void collect_modules(torch::nn::Module& module, std::shared_ptr<internal::Unit> enclosing,
                     std::vector<UnitModules>& collected) {
  auto unit = internal::find_unit(module);
  if (!unit) unit = std::move(enclosing);
  const auto same = [&](const auto& other) { return other.unit == unit; };
  auto place = std::find_if(collected.begin(), collected.end(), same);
  if (place == collected.end()) place = collected.insert(collected.end(), {unit, {}});
  place->modules.push_back(&module);
  for (const auto& child : module.children()) collect_modules(*child, unit, collected);
}

}  // namespace

void for_each_full_param(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& value)>& visit) {
  const auto params = find_params(module);
  for (size_t begin = 0, end = 0; begin < params.size(); begin = end) {
    const auto& group = params[begin].group;
    while (end < params.size() && params[end].group == group) ++end;
    c10::NoGradGuard no_grad;
    const Window window(group, end < params.size() ? params[end].group.get() : nullptr);
    for (size_t i = begin; i < end; ++i) {
      const auto* entry = internal::RegistryEntry::of(params[i].value);
      visit(params[i].name, entry == nullptr ? params[i].value : entry->member().detach());
    }
  }
}

void apply_unsharded(torch::nn::Module& module,
                     const std::function<void(torch::nn::Module&)>& function) {
  std::vector<UnitModules> collected;
  collect_modules(module, nullptr, collected);
  for (const auto& [unit, modules] : collected) {
    std::unique_ptr<SummonFullParams> full;
    if (unit)
      full = std::make_unique<SummonFullParams>(FSDPModule(unit), SummonOptions{.recurse = false});
    for (auto* const each : modules) function(*each);
  }
}

}  // namespace fsdp
