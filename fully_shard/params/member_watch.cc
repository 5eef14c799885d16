#include "fully_shard/params/member_watch.h"

#include "fully_shard/params/registry_entry.h"
#include "fully_shard/units/module_kind.h"
#include "fully_shard/units/registry_slot.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>

namespace fsdp::internal {

MemberWatch::MemberWatch(const std::vector<RegistrySlot>& slots) {
  for (const auto& slot : slots) {
    if (!is_container_without_forward(*slot.module))
      places_.push_back({slot.module->weak_from_this(), slot.key});
  }
}

bool MemberWatch::is_lost(const at::Tensor& member, const at::Tensor& entry) const {
  if (places_.empty() || member.use_count() > 1 || !entry.requires_grad()) return false;
  return std::any_of(places_.begin(), places_.end(), [&entry](const Place& place) {
    const auto module = place.module.lock();
    return module && registered({module.get(), place.key}).is_same(entry);
  });
}

void check_members_are_held(const FSDPParamGroup& group) {
  for (const auto& param : group.params()) {
    const auto entry = param.entry();
    const auto* owner = RegistryEntry::of(entry);
    if (owner == nullptr) continue;
    TORCH_CHECK_VALUE(!owner->watch().is_lost(owner->member(), entry), "parameter '", param.name(),
                      "' is registered, but the model no longer holds it: its member was "
                      "reassigned (weight = ...) after fully_shard, so the model computes with "
                      "another tensor and the parameter gets no gradient. Write values in place "
                      "under no_grad (weight.copy_(...)), keep computed weights in a local "
                      "variable, or reassign before fully_shard; where the parameter is meant to "
                      "be unused, freeze its entry with requires_grad_(false) (rank ",
                      group.info().rank(), ")");
  }
}

}  // namespace fsdp::internal
