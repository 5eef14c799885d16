#include "fully_shard/summon_full_params.h"

#include "device_mesh/module_ref.h"
#include "device_mesh/on_mesh/claims.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"
#include "on_demand/pass.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using internal::FSDPParamGroup;
using internal::ModuleTree;
using internal::RegistryEntry;
using internal::RegistrySlot;
using internal::Unit;
using GroupPtr = c10::intrusive_ptr<FSDPParamGroup>;

// Whether members may be other bytes than the shards.
bool are_converted(const FSDPParamGroup& group) {
  return internal::any(group.params(), &internal::ParamMeta::is_converted);
}

// Which registered parameters a SummonFullParams shows, and where they stand.

// A parameter with every registry slot it stands in (several when it is tied).
struct SummonedParam {
  at::Tensor entry;
  std::vector<RegistrySlot> slots;
  at::Tensor full;   // what the slots hold meanwhile; undefined where nothing is shown
  at::Tensor shard;  // as it was, where members borrow it and nothing is to be written back
  uint32_t full_version = 0, entry_version = 0;  // when it was shown

  const at::Tensor& member() const { return RegistryEntry::of(entry)->member(); }
  void fill_slots(const at::Tensor& tensor) const {
    for (const auto& slot : slots) internal::put(slot, tensor);
  }
};

struct SummonedUnit {
  GroupPtr group;
  std::vector<SummonedParam> params;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // kept alive for the slots
};

class Collection {
 public:
  void add_slot(const at::Tensor& entry, RegistrySlot slot) {
    const auto& group = RegistryEntry::of(entry)->group();
    auto& unit = find_or_add(units_, places_of_units_, group.get());
    unit.group = group;
    unit.modules.push_back(slot.module->weak_from_this().lock());
    auto& param = find_or_add(unit.params, places_of_params_, entry.unsafeGetTensorImpl());
    param.entry = entry;
    param.slots.push_back(std::move(slot));
  }

  std::vector<SummonedUnit> release() { return std::move(units_); }

 private:
  template <class Key>
  using Places = std::unordered_map<const Key*, size_t>;

  template <class Item, class Key>
  static Item& find_or_add(std::vector<Item>& items, Places<Key>& places, const Key* key) {
    const auto [place, is_new] = places.try_emplace(key, items.size());
    return is_new ? items.emplace_back() : items[place->second];
  }

  std::vector<SummonedUnit> units_;
  Places<FSDPParamGroup> places_of_units_;
  Places<c10::TensorImpl> places_of_params_;  // each in its unit
};

// Throws ValueError, for `function`, for a unit that is summoned.
//
// What a rank shows in its registry says nothing: it may be members, copies, or, with
// rank0_only, the entries.
void check_not_summoned(const Unit& unit, const char* function) {
  TORCH_CHECK_VALUE(!unit.is_summoned(), function, ": unit '", unit.display_name(),
                    "' is summoned already: a SummonFullParams that is alive (apply_unsharded has "
                    "some too) shows its full parameters, and they do not nest. End that scope "
                    "first; every rank gets this error");
}

// Throws ValueError for a group that is held unsharded.
void check_not_held(const FSDPParamGroup& group) {
  TORCH_CHECK_VALUE(!group.unsharded().state().is_held(), "SummonFullParams: unit '",
                    group.info().name(), "' is held unsharded already (rank ", group.info().rank(),
                    ")");
}

// The sharded parameters registered at and below `modules`, by unit in order of first
// appearance. Without recurse only those of the modules' own units. Throws ValueError, on
// every rank alike, where one of their units is summoned already.
std::vector<SummonedUnit> find_summoned_units(const std::vector<torch::nn::Module*>& modules,
                                              bool recurse) {
  const ModuleTree tree(modules);
  std::set<const FSDPParamGroup*> own;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (!tree.unit(i) || (!recurse && !tree.is_start(i))) continue;
    check_not_summoned(*tree.unit(i), "SummonFullParams");
    own.insert(tree.unit(i)->group());
  }
  Collection found;
  for (size_t i = 0; i < tree.size(); ++i) {
    for (auto& slot : internal::slots_of(tree.module(i))) {
      const auto& tensor = internal::registered(slot);
      const auto group = internal::find_managed_tensor(tensor).group;
      if (!group || (!recurse && !own.contains(group.get()))) continue;
      check_not_summoned(group->info().unit(), "SummonFullParams");
      found.add_slot(tensor, std::move(slot));
    }
  }
  return found.release();
}

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

// Not an alias of the shard, as a mesh of one rank would give. Collective.
at::Tensor copy_of(const at::Tensor& entry) {
  auto full = DTensor(entry.detach()).full_tensor();
  return full.is_alias_of(internal::local_of(entry)) ? full.clone() : full;
}

// Gradients are gathered where ranks have them, which is rank-local: an expert that one
// rank did not use, under NoSyncGuard. Throws ValueError on all ranks unless all have
// gradients of the same parameters, none of which waits. Collective over the unit's mesh.
void agree_on_gradients(const SummonedUnit& unit) {
  const auto& mesh = unit.group->info().mesh();
  internal::Claims claims("SummonFullParams: with_grads");
  std::string gradients;
  for (const auto& param : unit.params) {
    const auto index = RegistryEntry::of(param.entry)->index();
    const auto& name = unit.group->parameter_name(index);
    if (unit.group->gradients().unsharded().waits(index)) {
      claims.refuse(c10::str("SummonFullParams: with_grads while parameter '", name,
                             "' has a gradient that waits for synchronisation on rank ",
                             mesh.rank(),
                             "; run a synchronised backward, or zero_pending_gradients(), first"));
    }
    gradients += c10::str(param.entry.grad().defined() ? "one" : "none", " of '", name, "'\n");
  }
  claims.add("gradients", gradients);
  claims.check(mesh, "call zero_grad() and run backward on all");
}

}  // namespace

class SummonFullParams::Scope {
 public:
  Scope(std::vector<SummonedUnit> units, SummonOptions options)
      : units_(std::move(units)), options_(options) {
    check_options(options_);
    for (const auto& unit : units_) check_not_held(*unit.group);
    const c10::InferenceMode no_inference(false);
    const c10::NoGradGuard no_grad;
    for (const auto& unit : units_)
      if (options_.with_grads) agree_on_gradients(unit);
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
  bool shown_here(const FSDPParamGroup& group) const {
    const auto& coordinate = group.info().mesh().coordinate();
    return !options_.rank0_only || std::all_of(coordinate.begin(), coordinate.end(),
                                               [](int64_t place) { return place == 0; });
  }
  bool stays_held(const FSDPParamGroup& group) const {
    return shown_here(group) && !options_.offload_to_cpu && !are_converted(group);
  }

  // Members of a dtype of their own are not what is to be seen: copies are.
  void open(SummonedUnit& unit) {
    const bool shows_members = !are_converted(*unit.group);
    if (shows_members) internal::hold(*unit.group);
    unit.group->info().unit().summoned =
        options_.writeback ? internal::Summoned::kKeepsWrites : internal::Summoned::kDropsWrites;
    try {
      for (auto& param : unit.params) show(param, *unit.group);
    } catch (...) {
      unit.group->info().unit().summoned = internal::Summoned::kNo;
      if (shows_members) internal::release(*unit.group);
      throw;
    }
    if (shows_members && !stays_held(*unit.group)) internal::release(*unit.group);
  }

  void show(SummonedParam& param, const FSDPParamGroup& group) const {
    auto value = are_converted(group) ? copy_of(param.entry) : param.member();
    const auto& gradient = param.entry.grad();
    auto full_gradient =
        options_.with_grads && gradient.defined() ? DTensor(gradient).full_tensor() : at::Tensor();
    if (!shown_here(group)) return;
    const bool changes_are_dropped =
        group.unsharded().state().is_never_sharded() && !options_.writeback;
    if (full_gradient.defined() && changes_are_dropped) full_gradient = full_gradient.clone();
    param.full = value;
    if (options_.offload_to_cpu) {
      param.full = value.to(at::kCPU, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    } else if (changes_are_dropped) {
      param.shard = internal::local_of(param.entry).clone();
    }
    if (!stays_held(group)) param.full.set_requires_grad(param.entry.requires_grad());
    if (full_gradient.defined()) param.full.mutable_grad() = full_gradient.to(value.device());
    param.full_version = static_cast<uint32_t>(param.full._version());
    param.entry_version = static_cast<uint32_t>(param.entry._version());
    param.fill_slots(param.full);
  }

  void close() noexcept {
    const c10::InferenceMode no_inference(false);
    const c10::NoGradGuard no_grad;
    while (opened_ > 0) close(units_[--opened_]);
  }

  // Where copies are shown the members may be written beside them.
  static bool only_member_was_written(const SummonedParam& param, FSDPParamGroup& group) {
    const auto index = static_cast<size_t>(RegistryEntry::of(param.entry)->index());
    const bool member_was =
        group.writes().newest().is_dirty(index) || param.entry._version() != param.entry_version;
    return member_was && param.full._version() == param.full_version;
  }

  // A plain tensor that is copied into an entry must be the same on all ranks, but what
  // is written to a summoned parameter need not be.
  static at::Tensor part_of(const at::Tensor& full, const at::Tensor& entry) {
    const at::Tensor value = full.detach().to(entry.device());
    if (is_dtensor(value)) return value;
    const auto& spec = internal::spec_of(entry);
    return internal::make_dtensor(internal::local_part(value, spec), spec);
  }

  void close(SummonedUnit& unit) {
    unit.group->info().unit().summoned = internal::Summoned::kNo;
    for (const auto& param : unit.params) {
      if (!param.full.defined()) continue;
      param.fill_slots(param.entry);
      if (options_.with_grads) hide_gradient(param);
      if (param.shard.defined()) internal::local_of(param.entry).copy_(param.shard);
    }
    if (stays_held(*unit.group)) {
      if (options_.writeback) {
        for (size_t i = 0; i < unit.group->params().size(); ++i)
          unit.group->member_written(static_cast<int64_t>(i));
      } else {
        unit.group->writes().newest().copy_discarded();
      }
      internal::release_own_parts(*unit.group);
    } else if (options_.writeback) {
      for (auto& param : unit.params) {
        if (!only_member_was_written(param, *unit.group))
          param.entry.copy_(part_of(param.full, param.entry));
      }
    }
  }

  void hide_gradient(const SummonedParam& param) const {
    at::Tensor shown = param.full;
    const auto full = std::exchange(shown.mutable_grad(), {});
    if (!options_.writeback) return;
    auto entry = param.entry;
    const DTensor placed(entry);
    entry.mutable_grad() =
        full.defined()
            ? distribute_tensor(full.to(entry.device()), placed.device_mesh(), placed.placements())
            : at::Tensor();
  }

  std::vector<SummonedUnit> units_;
  SummonOptions options_;
  size_t opened_ = 0;  // of units_, from the front
};

SummonFullParams::SummonFullParams(ModuleRef module, SummonOptions options)
    : scope_(
          std::make_unique<Scope>(find_summoned_units({module.get()}, options.recurse), options)) {}

SummonFullParams::SummonFullParams(const FSDPModule& unit, SummonOptions options) {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  std::vector<torch::nn::Module*> modules;
  for (const auto& weak : internal::unit_of(unit)->modules()) {
    auto module = weak.lock();
    TORCH_CHECK_VALUE(module, "SummonFullParams: a module of unit '", unit.name(), "' died");
    modules.push_back(module.get());
    alive.push_back(std::move(module));
  }
  scope_ = std::make_unique<Scope>(find_summoned_units(modules, options.recurse), options);
}

SummonFullParams::~SummonFullParams() = default;

namespace {

// Keeps one group unsharded, and has the gather of the next one in flight.
class Window {
 public:
  Window(const GroupPtr& group, FSDPParamGroup* next) : group_(group) {
    if (!group_) return;
    internal::hold(*group_);
    if (next != nullptr && !are_converted(*next)) internal::unshard_async(*next);
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
  const ModuleTree tree({&module});
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
  void enter(const std::shared_ptr<Unit>& unit) {
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
    std::shared_ptr<Unit> unit;
    std::unique_ptr<SummonFullParams> full;
  };
  static bool encloses(const Unit& open, const std::shared_ptr<Unit>& unit) {
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
    const bool casts = group && are_converted(*group);
    const Window window(casts ? GroupPtr() : group,
                        end < params.size() ? params[end].group.get() : nullptr);
    for (size_t i = begin; i < end; ++i) visit(params[i].name, full_value(params[i].value, casts));
  }
}

void apply_unsharded(ModuleRef module, const std::function<void(torch::nn::Module&)>& function) {
  auto& root = internal::given_module("apply_unsharded", module);
  const ModuleTree tree({&root});
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<Unit>> units;
  for (size_t i = 0; i < tree.size(); ++i) {
    const auto unit = tree.nearest_unit(i);
    if (unit) check_not_summoned(*unit, "apply_unsharded");
    units.emplace(&tree.module(i), unit);
  }
  OpenUnits open;
  root.apply([&](torch::nn::Module& each) {
    open.enter(units.at(&each));
    function(each);
  });
}

}  // namespace fsdp
