#include "fully_shard/fsdp_module.h"

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/step/runtime.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_events.h"
#include "fully_shard/units/validation.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace fsdp {
namespace {

std::vector<internal::UnitId> ids_of(const std::vector<FSDPModule>& modules) {
  std::vector<internal::UnitId> ids;
  for (const auto& module : modules) ids.push_back(internal::unit_of(module)->id);
  return ids;
}

// Of the dimension that shards and, where there are replicas, of the other.
std::vector<const c10d::ProcessGroup*> process_groups(const DeviceMesh& mesh) {
  std::vector<const c10d::ProcessGroup*> groups = {
      mesh.group(internal::shard_mesh_dim(mesh)).get()};
  if (const auto dim = internal::replicate_mesh_dim(mesh)) groups.push_back(mesh.group(*dim).get());
  return groups;
}

}  // namespace

const std::shared_ptr<internal::Unit>& internal::unit_of(const FSDPModule& module) {
  return module.unit_;
}

FSDPModule internal::handle_of(std::shared_ptr<internal::Unit> unit) {
  return FSDPModule(std::move(unit));
}

void UnshardHandle::wait() {
  const auto unit = unit_.lock();
  unit_.reset();
  if (!unit || unit->group() == nullptr) return;
  internal::unshard(*unit->group());
  internal::tell_unit_observer(&internal::UnitObserver::unsharded_explicitly, *unit);
}

Counters FSDPModule::counters() const { return unit_->root()->accounts().counters(); }
const std::string& FSDPModule::name() const { return unit_->name; }
bool FSDPModule::is_root() const { return unit_->is_root(); }

std::vector<std::shared_ptr<torch::nn::Module>> FSDPModule::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (const auto& weak : unit_->modules()) {
    if (auto module = weak.lock()) alive.push_back(std::move(module));
  }
  return alive;
}

std::vector<at::Tensor> FSDPModule::parameters() const {
  std::vector<at::Tensor> entries;
  if (unit_->group() == nullptr) return entries;
  for (const auto& param : unit_->group()->params()) {
    if (auto entry = param.entry(); entry.defined()) entries.push_back(std::move(entry));
  }
  return entries;
}

bool FSDPModule::spans_single_mesh() const {
  std::optional<std::vector<const c10d::ProcessGroup*>> first;
  bool same = true;
  internal::for_each_unit_below(*unit_, [&](internal::Unit& unit) {
    if (unit.group() == nullptr) return;
    const auto groups = process_groups(unit.group()->info().mesh());
    if (!first) first = groups;
    same &= groups == *first;
  });
  return same;
}

void FSDPModule::for_each_unit(bool recurse, const std::function<void(internal::Unit&)>& visit) {
  if (recurse) {
    internal::for_each_unit_below(*unit_, visit);
  } else {
    visit(*unit_);
  }
}

void FSDPModule::unshard() { unshard_async().wait(); }

UnshardHandle FSDPModule::unshard_async() {
  if (unit_->group() != nullptr) {
    internal::unshard_async(*unit_->group());
    internal::tell_unit_observer(&internal::UnitObserver::unshard_issued, *unit_);
  }
  return UnshardHandle(unit_);
}

void FSDPModule::reshard() {
  if (unit_->group() == nullptr) return;
  internal::await_failed_backward(*unit_);
  unit_->group()->reshard();
  unit_->root()->raw_writes().raise(unit_->group()->info().rank());
  internal::tell_unit_observer(&internal::UnitObserver::resharded_explicitly, *unit_);
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_unit(recurse,
                [=](auto& unit) { unit.policy.synchronize_gradients = requires_gradient_sync; });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_unit(recurse,
                [=](auto& unit) { unit.policy.all_reduce_gradients = requires_all_reduce; });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  unit_->root()->set_is_last_backward(is_last_backward);
}

void FSDPModule::set_reshard_after_forward(ReshardAfterForward reshard_after_forward,
                                           bool recurse) {
  struct Change {
    internal::Unit& unit;
    std::optional<bool> reshards;
    std::shared_ptr<internal::Transport> neighbours;
  };
  internal::await_failed_backward(*unit_);
  std::vector<Change> changes;  // all that may throw comes before the first
  for_each_unit(recurse, [&](auto& unit) {
    if (unit.group() == nullptr) {
      changes.push_back({unit, reshard_after_forward.reshards(), nullptr});
      return;
    }
    const auto& mesh = unit.group()->info().mesh();
    const auto resolved = internal::resolve_reshard_after_forward("set_reshard_after_forward",
                                                                  reshard_after_forward, mesh);
    auto neighbours = resolved.neighbours
                          ? internal::Runtime::of(mesh)->neighbours(mesh, *resolved.neighbours)
                          : nullptr;
    changes.push_back({unit, resolved.reshards, std::move(neighbours)});
  });
  for (auto& change : changes) {
    change.unit.policy.reshard_after_forward = change.reshards;
    if (change.unit.group())
      change.unit.group()->unsharded().set_neighbours(std::move(change.neighbours));
  }
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_unit(recurse,
                [=](auto& unit) { unit.policy.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  unit_->policy.prefetch_in_backward = unshard_in_backward;
}

void FSDPModule::set_backward_prefetch(BackwardPrefetch when, bool recurse) {
  for_each_unit(recurse, [=](auto& unit) {
    unit.policy.prefetch_after_gradients = when == BackwardPrefetch::kPost;
  });
}

void FSDPModule::set_full_precision(bool full_precision, bool recurse) {
  std::vector<internal::Unit*> units;
  for_each_unit(recurse, [&](auto& unit) {
    if (unit.policy.full_precision != full_precision) units.push_back(&unit);
  });
  for (auto* unit : units) {
    if (unit->group() && internal::has_less_precision(*unit->group()))
      internal::check_precision_may_change(*unit->group());
  }
  for (auto* unit : units) {
    unit->policy.full_precision = full_precision;
    unit->cast_buffers();
    if (unit->group() && internal::has_less_precision(*unit->group()))
      internal::set_full_precision(*unit->group(), full_precision);
  }
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  internal::await_failed_backward(*unit_);
  unit_->root()->schedule().set_prefetch_list(unit_->id, /*backward=*/false, ids_of(modules));
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  internal::await_failed_backward(*unit_);
  unit_->root()->schedule().set_prefetch_list(unit_->id, /*backward=*/true, ids_of(modules));
}

void FSDPModule::ignore(const std::vector<at::Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_VALUE(parameters[i].defined(), "FSDPModule::ignore: parameters[", i,
                      "] is undefined");
    const auto managed = internal::find_managed_tensor(parameters[i]);
    if (!managed.group) continue;
    TORCH_CHECK_VALUE(false, "FSDPModule::ignore: parameters[", i, "] is parameter '",
                      managed.group->parameter_name(managed.index),
                      "', which is sharded already; name it in "
                      "FullyShardOptions::ignored_params instead (rank ",
                      managed.group->info().mesh().rank(), ")");
  }
  unit_->ignore(parameters);
}

void FSDPModule::zero_pending_gradients(bool recurse) {
  internal::await_failed_backward(*unit_);
  for_each_unit(recurse, [](auto& unit) {
    if (unit.group() != nullptr) unit.group()->gradients().drop_accumulated();
  });
}

void FSDPModule::reset_lazy_init() {
  internal::await_failed_backward(*unit_);
  unit_->root()->schedule().forget();
}

void FSDPModule::set_reduce_scatter_unused_params(bool enable, bool recurse) {
  for_each_unit(recurse, [=](auto& unit) { unit.policy.reduce_unused_params = enable; });
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0, "set_gradient_divide_factor: factor is ", factor,
                    "; it must be positive");
  unit_->policy.gradient_divide_factor = factor;
}

void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook) {
  if (unit_->group() != nullptr) unit_->group()->gradients().settings().set_hook(std::move(hook));
}

void FSDPModule::set_custom_all_gather(Communicate all_gather) {
  unit_->custom.all_gather = std::move(all_gather);
}

void FSDPModule::set_custom_reduce_scatter(Communicate reduce_scatter) {
  TORCH_CHECK_VALUE(!reduce_scatter || !unit_->gradient_codecs.shards,
                    "set_custom_reduce_scatter: the gradients of unit '", unit_->display_name(),
                    "' travel as codes (gradient_codecs.shards), which a function can not add up");
  unit_->custom.reduce_scatter = std::move(reduce_scatter);
}

void FSDPModule::set_post_optim_event(std::shared_ptr<c10::Event> event) {
  if (event && unit_->group() != nullptr) {
    const auto device = unit_->group()->info().mesh().device_type();
    TORCH_CHECK_VALUE(event->device_type() == device, "set_post_optim_event: the event is of ",
                      event->device_type(), " but the mesh of ", device, " (rank ",
                      unit_->group()->info().mesh().rank(), ")");
  }
  unit_->root()->gather_after(std::move(event));
}

NoSyncGuard::NoSyncGuard(FSDPModule module) {
  internal::for_each_unit_below(*internal::unit_of(module), [this](internal::Unit& unit) {
    before_.push_back({unit.weak_from_this(), unit.policy.synchronize_gradients});
  });
  for (const auto& [unit, synchronized] : before_)
    unit.lock()->policy.synchronize_gradients = false;
}

NoSyncGuard::~NoSyncGuard() {
  for (const auto& [weak, synchronized] : before_) {
    if (const auto unit = weak.lock()) unit->policy.synchronize_gradients = synchronized;
  }
}

}  // namespace fsdp
