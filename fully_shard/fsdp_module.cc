#include "fully_shard/fsdp_module.h"

#include "fully_shard/fully_shard.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp {
namespace {

void for_each_below(internal::Unit& unit, const std::function<void(internal::Unit&)>& visit) {
  visit(unit);
  for (const auto& weak : unit.children) {
    if (const auto child = weak.lock()) for_each_below(*child, visit);
  }
}

[[noreturn]] void not_implemented(const char* method) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "FSDPModule::", method, " is not implemented yet");
}

}  // namespace

void UnshardHandle::wait() {
  const auto unit = unit_.lock();
  unit_.reset();
  if (unit && unit->group != nullptr) unit->group->unshard();
}

const std::string& FSDPModule::name() const { return unit_->name; }
bool FSDPModule::is_root() const { return unit_->is_root(); }

void FSDPModule::for_each_unit(bool recurse, const std::function<void(internal::Unit&)>& visit) {
  if (recurse) {
    for_each_below(*unit_, visit);
  } else {
    visit(*unit_);
  }
}

void FSDPModule::unshard() { unshard_async().wait(); }

UnshardHandle FSDPModule::unshard_async() {
  if (unit_->group != nullptr) unit_->group->issue_all_gather();
  return UnshardHandle(unit_);
}

void FSDPModule::reshard() {
  if (unit_->group == nullptr) return;
  unit_->group->reshard();
  const auto& context = unit_->group->context();
  context->raw_writes().raise(context->rank());
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_unit(recurse, [=](auto& unit) { unit.synchronize_gradients = requires_gradient_sync; });
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  for_each_unit(true, [=](auto& unit) {
    if (unit.group != nullptr)
      unit.group->context()->backward().set_is_last_backward(is_last_backward);
  });
}

void FSDPModule::set_reshard_after_forward(ReshardAfterForward reshard_after_forward,
                                           bool recurse) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !reshard_after_forward.world(),
      "set_reshard_after_forward: ReshardAfterForward::to_world(n) is not implemented yet");
  for_each_unit(recurse, [&](auto& unit) { unit.reshard_after_forward = reshard_after_forward; });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_unit(recurse, [=](auto& unit) { unit.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  unit_->prefetch_in_backward = unshard_in_backward;
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  unit_->forward_prefetch.clear();
  for (const auto& module : modules) unit_->forward_prefetch.push_back(module.unit_);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  unit_->backward_prefetch.clear();
  for (const auto& module : modules) unit_->backward_prefetch.push_back(module.unit_);
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0, "set_gradient_divide_factor: factor is ", factor,
                    "; it must be positive");
  unit_->gradient_divide_factor = factor;
}

void FSDPModule::zero_pending_gradients(bool recurse) {
  for_each_unit(recurse, [](auto& unit) {
    if (unit.group != nullptr) unit.group->drop_pending();
  });
}

void FSDPModule::reset_lazy_init() {
  for_each_unit(true, [](auto& unit) {
    if (unit.group != nullptr) unit.group->context()->schedule().forget();
  });
}

void FSDPModule::set_requires_all_reduce(bool, bool) { not_implemented("set_requires_all_reduce"); }
void FSDPModule::set_force_sum_reduction_for_comms(bool) {
  not_implemented("set_force_sum_reduction_for_comms");
}
void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)>) {
  not_implemented("set_all_reduce_hook");
}
void FSDPModule::set_custom_all_gather(Communicate) { not_implemented("set_custom_all_gather"); }
void FSDPModule::set_custom_reduce_scatter(Communicate) {
  not_implemented("set_custom_reduce_scatter");
}
void FSDPModule::set_post_optim_event(std::shared_ptr<void>) {
  not_implemented("set_post_optim_event");
}
void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool) {
  not_implemented("set_allocate_memory_from_process_group_for_comm");
}
void FSDPModule::set_reduce_scatter_unused_params(bool, bool) {
  not_implemented("set_reduce_scatter_unused_params");
}

NoSyncGuard::NoSyncGuard(FSDPModule module) : module_(std::move(module)) {
  module_.set_requires_gradient_sync(false);
}
NoSyncGuard::~NoSyncGuard() { module_.set_requires_gradient_sync(true); }

}  // namespace fsdp
