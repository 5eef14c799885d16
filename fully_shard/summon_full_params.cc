#include "fully_shard/summon_full_params.h"

#include "dtensor/dtensor.h"
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/registry_slot.h"
#include "fully_shard/units/unit.h"
#include "on_demand/pass.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using internal::ParamGroup;
using internal::RegistryEntry;

using internal::ModuleTree;
using internal::RegistrySlot;

// A parameter with every registry slot it stands in (several when it is tied).
struct SummonedParam {
  at::Tensor entry;
  std::vector<RegistrySlot> slots;
  at::Tensor full;   // what the slots hold meanwhile; undefined where nothing is shown
  at::Tensor shard;  // as it was, where members borrow it and nothing is to be written back

  const at::Tensor& member() const { return RegistryEntry::of(entry)->member(); }
  void fill_slots(const at::Tensor& tensor) const {
    for (const auto& slot : slots) internal::put(slot, tensor);
  }
};

struct SummonedUnit {
  c10::intrusive_ptr<ParamGroup> group;
  std::vector<SummonedParam> params;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // kept alive for the slots
};

void check_options(const SummonOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.rank0_only || !options.writeback,
      "SummonFullParams: rank0_only with writeback: only rank 0 has something to write back; set "
      "writeback = false");
  TORCH_CHECK_NOT_IMPLEMENTED(!options.offload_to_cpu || !options.with_grads,
                              "SummonFullParams: offload_to_cpu with with_grads is not supported");
  TORCH_CHECK_VALUE(internal::current_graph_task() == -1,
                    "SummonFullParams: not allowed inside a backward");
  if (options.offload_to_cpu && !options.rank0_only) {
    TORCH_WARN_ONCE(
        "SummonFullParams: offload_to_cpu without rank0_only copies the whole model on every rank");
  }
}

void check_not_held(const ParamGroup& group) {
  TORCH_CHECK_VALUE(!group.residency().is_held(), "SummonFullParams: unit '", group.name(),
                    "' is held unsharded already (rank ", group.dim().global_rank(), ")");
}

void check_unit(const SummonedUnit& unit, bool with_grads) {
  const auto& group = *unit.group;
  check_not_held(group);
  for (const auto& param : unit.params) {
    const auto& gradient = param.member().grad();
    TORCH_CHECK_VALUE(
        !with_grads || !gradient.defined() || internal::is_untouched_tripwire(gradient),
        "SummonFullParams: with_grads while parameter '",
        group.parameter_name(RegistryEntry::of(param.entry)->index()),
        "' has a gradient that waits for synchronisation; run a synchronised backward, or "
        "zero_pending_gradients(), first (rank ",
        group.dim().global_rank(), ")");
  }
}

template <class Item, class Matches>
Item& find_or_add(std::vector<Item>& items, const Matches& matches) {
  const auto found = std::find_if(items.begin(), items.end(), matches);
  return found != items.end() ? *found : items.emplace_back();
}

void add_slot(std::vector<SummonedUnit>& units, const at::Tensor& entry, RegistrySlot slot) {
  const auto& group = RegistryEntry::of(entry)->group();
  auto& unit = find_or_add(units, [&](const auto& other) { return other.group == group; });
  unit.group = group;
  unit.modules.push_back(slot.module->weak_from_this().lock());
  auto& param =
      find_or_add(unit.params, [&](const auto& other) { return other.entry.is_same(entry); });
  param.entry = entry;
  param.slots.push_back(std::move(slot));
}

// The sharded parameters registered at and below `modules`, by unit in order of first
// appearance. Without recurse only those of the modules' own units.
std::vector<SummonedUnit> find_units(const std::vector<torch::nn::Module*>& modules, bool recurse) {
  std::vector<SummonedUnit> units;
  const ModuleTree tree(modules);
  std::set<const ParamGroup*> own;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree.is_start(i) && tree.unit(i)) own.insert(tree.unit(i)->group);
  }
  for (size_t i = 0; i < tree.size(); ++i) {
    for (auto& slot : internal::slots_of(tree.module(i))) {
      const auto& tensor = internal::registered(slot);
      const auto group = internal::find_managed_tensor(tensor).group;
      if (!group || (!recurse && !own.contains(group.get()))) continue;
      if (RegistryEntry::of(tensor) == nullptr) {
        check_not_held(*group);
      } else {
        add_slot(units, tensor, std::move(slot));
      }
    }
  }
  return units;
}

}  // namespace

class SummonFullParams::Scope {
 public:
  Scope(std::vector<SummonedUnit> units, SummonOptions options)
      : units_(std::move(units)), options_(options) {
    check_options(options_);
    for (const auto& unit : units_) check_unit(unit, options_.with_grads);
    c10::InferenceMode no_inference(false);
    c10::NoGradGuard no_grad;
    try {
      for (; opened_ < units_.size(); ++opened_) open(units_[opened_]);
    } catch (...) {
      options_.writeback = false;
      close();
      throw;
    }
  }
  ~Scope() { close(); }

 private:
  bool shown_here(const ParamGroup& group) const {
    return !options_.rank0_only || group.dim().shard_rank() == 0;
  }
  bool stays_held(const ParamGroup& group) const {
    return shown_here(group) && !options_.offload_to_cpu;
  }

  void open(SummonedUnit& unit) {
    unit.group->hold();
    ++unit.group->unit().summons;
    try {
      for (auto& param : unit.params) show(param, *unit.group);
    } catch (...) {
      --unit.group->unit().summons;
      unit.group->release();
      throw;
    }
    if (!stays_held(*unit.group)) unit.group->release();
  }

  void show(SummonedParam& param, const ParamGroup& group) const {
    auto member = param.member();
    const auto& gradient = param.entry.grad();
    auto full_gradient =
        options_.with_grads && gradient.defined() ? DTensor(gradient).full_tensor() : at::Tensor();
    if (!shown_here(group)) return;
    const bool changes_are_dropped = group.residency().is_borrowed() && !options_.writeback;
    if (full_gradient.defined() && changes_are_dropped) full_gradient = full_gradient.clone();
    param.full = member;
    if (options_.offload_to_cpu) {
      param.full = member.to(at::kCPU, member.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      param.full.set_requires_grad(param.entry.requires_grad());
    } else if (changes_are_dropped) {
      param.shard = internal::local_of(param.entry).clone();
    }
    if (full_gradient.defined()) member.mutable_grad() = full_gradient;
    param.fill_slots(param.full);
  }

  void close() noexcept {
    c10::InferenceMode no_inference(false);
    c10::NoGradGuard no_grad;
    while (opened_ > 0) close(units_[--opened_]);
  }

  void close(SummonedUnit& unit) {
    --unit.group->unit().summons;
    for (const auto& param : unit.params) {
      if (!param.full.defined()) continue;
      param.fill_slots(param.entry);
      if (options_.with_grads) hide_gradient(param);
      if (param.shard.defined()) internal::local_of(param.entry).copy_(param.shard);
    }
    if (stays_held(*unit.group)) {
      if (options_.writeback) {
        unit.group->mark_all_written();
      } else {
        unit.group->forget_writes();
      }
      unit.group->release_own_parts();
    } else if (options_.writeback) {
      for (auto& param : unit.params) param.entry.copy_(param.full.to(param.entry.device()));
    }
  }

  void hide_gradient(const SummonedParam& param) const {
    auto member = param.member();
    const auto full = std::exchange(member.mutable_grad(), {});
    if (!options_.writeback) return;
    auto entry = param.entry;
    const DTensor placed(entry);
    entry.mutable_grad() = full.defined()
                               ? distribute_tensor(full, placed.device_mesh(), placed.placements())
                               : at::Tensor();
  }

  std::vector<SummonedUnit> units_;
  SummonOptions options_;
  size_t opened_ = 0;  // of units_, from the front
};

SummonFullParams::SummonFullParams(torch::nn::Module& module, SummonOptions options)
    : scope_(std::make_unique<Scope>(find_units({&module}, options.recurse), options)) {}

SummonFullParams::SummonFullParams(const FSDPModule& unit, SummonOptions options) {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  std::vector<torch::nn::Module*> modules;
  for (const auto& weak : unit.unit()->modules) {
    auto module = weak.lock();
    TORCH_CHECK_VALUE(module, "SummonFullParams: a module of unit '", unit.name(), "' died");
    modules.push_back(module.get());
    alive.push_back(std::move(module));
  }
  scope_ = std::make_unique<Scope>(find_units(modules, options.recurse), options);
}

SummonFullParams::~SummonFullParams() = default;

}  // namespace fsdp
