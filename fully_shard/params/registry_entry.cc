#include "fully_shard/params/registry_entry.h"

#include "dtensor/dtensor.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/sharded_grad.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

namespace fsdp::internal {

RegistryEntry* RegistryEntry::of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? dynamic_cast<RegistryEntry*>(owner_of(tensor)) : nullptr;
}

std::string RegistryEntry::codec() const {
  const auto& meta = group_->params()[static_cast<size_t>(index_)].meta();
  return meta.is_stored_as_codes() ? meta.codec()->name : "";
}

std::string RegistryEntry::description() const {
  return c10::str("parameter '", group_->parameter_name(index_), "' of unit '",
                  group_->info().name(), "' (number ", group_->info().number(), ")");
}

bool RegistryEntry::shows_all(const at::Tensor& dtensor) const {
  const auto& shape = group_->params()[static_cast<size_t>(index_)].spec().shape();
  return dtensor.numel() == c10::multiply_integers(shape);
}

void RegistryEntry::before_set_data(const at::Tensor& dtensor, const at::Tensor& from) {
  const auto& name = group_->parameter_name(index_);
  const auto rank = group_->info().rank();
  group_->unsharded().check_has_values();
  TORCH_CHECK_VALUE(group_->params()[static_cast<size_t>(index_)].entry().is_same(dtensor),
                    "set_data on an alias of the registry entry of parameter '", name,
                    "': its data can not be replaced (rank ", rank, ")");
  const bool fits =
      from.sizes() == dtensor.sizes() && from.device() == dtensor.device() &&
      (!is_dtensor(from) || spec_of(from).placements() == spec_of(dtensor).placements());
  TORCH_CHECK_VALUE(fits, "set_data on the registry entry of parameter '", name, "' of shape ",
                    dtensor.sizes(), " on ", dtensor.device(), " from a tensor of shape ",
                    from.sizes(), " on ", from.device(),
                    ": shape, device and placements of a sharded parameter stay (Module::to can "
                    "change its dtype; load files "
                    "with the mesh's device; rank ",
                    rank, ")");
  change_dtype(*group_, index_, from);
}

void RegistryEntry::before_whole_read(const at::Tensor&) {
  const auto entry = group_->params()[static_cast<size_t>(index_)].entry();
  if (entry.defined()) lead_whole_gradients(entry, member_);
}

// A view of plain memory reads nothing, and what is empty is filled where the view is
// used. A view of a tensor-parallel member across its cut is computed from its parts.
void RegistryEntry::while_readable(const std::function<void()>& view) {
  TouchedGroups groups;
  const auto* const storage = is_dtensor(member_) ? OnDemandStorage::behind(member_) : nullptr;
  if (storage != nullptr) groups.add(*storage);
  groups.fill();
  view();
}

ManagedTensor find_managed_tensor(const at::Tensor& tensor) {
  if (const auto* entry = RegistryEntry::of(tensor)) return {entry->group(), entry->index()};
  if (!tensor.defined()) return {};
  const auto* storage = OnDemandStorage::behind(tensor);
  auto* group = storage == nullptr ? nullptr : dynamic_cast<FSDPParamGroup*>(&storage->group());
  if (group == nullptr) return {};
  return {c10::intrusive_ptr<FSDPParamGroup>::reclaim_copy(group), storage->index()};
}

}  // namespace fsdp::internal
