// What a unit's collectives are, and what happens around them.
#include "fully_shard/fsdp_module.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/units/root.h"
#include "fully_shard/units/unit.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp {
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

}  // namespace fsdp
