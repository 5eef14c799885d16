#include "fully_shard/summon_full_params.h"

#include "dtensor/dtensor.h"
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/managed_modules.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_table.h"
#include "on_demand/pass.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using internal::ParamGroup;
using internal::RegistryEntry;

struct Slot {
  std::shared_ptr<torch::nn::Module> module;
  std::string key;
};

// A parameter with every registry slot it stands in (several when it is tied).
struct SummonedParam {
  at::Tensor entry;
  std::vector<Slot> slots;
  at::Tensor full;   // what the slots hold meanwhile; undefined where nothing is shown
  at::Tensor shard;  // as it was, where members borrow it and nothing is to be written back

  const at::Tensor& member() const { return RegistryEntry::of(entry)->member(); }
  void fill_slots(const at::Tensor& tensor) const {
    for (const auto& slot : slots)
      internal::replace_parameter({slot.module.get(), slot.key, ""}, tensor);
  }
};

struct SummonedUnit {
  c10::intrusive_ptr<ParamGroup> group;
  std::vector<SummonedParam> params;
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
  TORCH_CHECK_VALUE(!group.held(), "SummonFullParams: unit '", group.name(),
                    "' is held unsharded already (rank ", group.context()->rank(), ")");
}

void check_unit(const SummonedUnit& unit, bool with_grads) {
  const auto& group = *unit.group;
  check_not_held(group);
  for (const auto& param : unit.params) {
    const auto& gradient = param.member().grad();
    TORCH_CHECK_VALUE(
        !with_grads || !gradient.defined() || internal::is_tripwire(gradient),
        "SummonFullParams: with_grads while parameter '",
        group.parameter_name(RegistryEntry::of(param.entry)->index()),
        "' has a gradient that waits for synchronisation; run a synchronised backward, or "
        "zero_pending_gradients(), first (rank ",
        group.context()->rank(), ")");
  }
}

template <class Item, class Matches>
Item& find_or_add(std::vector<Item>& items, const Matches& matches) {
  const auto found = std::find_if(items.begin(), items.end(), matches);
  return found != items.end() ? *found : items.emplace_back();
}

void add_slot(std::vector<SummonedUnit>& units, const at::Tensor& entry, Slot slot) {
  const auto& group = RegistryEntry::of(entry)->group();
  auto& unit = find_or_add(units, [&](const auto& other) { return other.group == group; });
  unit.group = group;
  auto& param =
      find_or_add(unit.params, [&](const auto& other) { return other.entry.is_same(entry); });
  param.entry = entry;
  param.slots.push_back(std::move(slot));
}

// The sharded parameters registered at and below `module`, by unit in order of first
// appearance.
std::vector<SummonedUnit> find_units(torch::nn::Module& module) {
  std::vector<SummonedUnit> units;
  for (const auto& below : module.modules()) {
    for (const auto& item : below->named_parameters(/*recurse=*/false)) {
      if (RegistryEntry::of(item.value()) != nullptr) {
        add_slot(units, item.value(), {below, item.key()});
      } else if (const auto group = internal::find_managed_tensor(item.value()).group) {
        check_not_held(*group);
      }
    }
  }
  return units;
}

std::vector<SummonedUnit> find_units(torch::nn::Module& module, bool recurse) {
  auto units = find_units(module);
  if (recurse) return units;
  const auto own = internal::find_unit(module);
  std::erase_if(units, [&](const auto& unit) { return !own || unit.group.get() != own->group; });
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
    return !options_.rank0_only || group.context()->rank() == 0;
  }
  bool stays_held(const ParamGroup& group) const {
    return shown_here(group) && !options_.offload_to_cpu;
  }

  void open(SummonedUnit& unit) {
    unit.group->hold();
    try {
      for (auto& param : unit.params) show(param, *unit.group);
    } catch (...) {
      unit.group->release();
      throw;
    }
    if (!stays_held(*unit.group)) unit.group->release();
  }

  void show(SummonedParam& param, const ParamGroup& group) const {
    auto member = param.member();
    const auto& gradient = param.entry.grad();
    const auto full_gradient =
        options_.with_grads && gradient.defined() ? DTensor(gradient).full_tensor() : at::Tensor();
    if (!shown_here(group)) return;
    param.full = member;
    if (options_.offload_to_cpu) {
      param.full = member.to(at::kCPU, member.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      param.full.set_requires_grad(param.entry.requires_grad());
    } else if (group.context()->world() == 1 && !options_.writeback) {
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
      unit.group->release();
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
    : scope_(std::make_unique<Scope>(find_units(module, options.recurse), options)) {}

SummonFullParams::SummonFullParams(const FSDPModule& unit, SummonOptions options) {
  std::vector<SummonedUnit> units;
  for (const auto& weak : unit.unit()->modules) {
    const auto module = weak.lock();
    TORCH_CHECK_VALUE(module, "SummonFullParams: a module of unit '", unit.name(), "' died");
    for (auto& found : find_units(*module, options.recurse)) {
      const bool known = std::any_of(units.begin(), units.end(),
                                     [&](auto& other) { return other.group == found.group; });
      if (!known) units.push_back(std::move(found));
    }
  }
  scope_ = std::make_unique<Scope>(std::move(units), options);
}

SummonFullParams::~SummonFullParams() = default;

}  // namespace fsdp
