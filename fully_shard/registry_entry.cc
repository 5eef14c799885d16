#include "fully_shard/registry_entry.h"

#include "dtensor/dtensor.h"

namespace fsdp::internal {

RegistryEntry* RegistryEntry::of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? dynamic_cast<RegistryEntry*>(owner_of(tensor)) : nullptr;
}

ManagedTensor find_managed_tensor(const at::Tensor& tensor) {
  if (const auto* entry = RegistryEntry::of(tensor)) return {entry->group(), entry->index()};
  if (!tensor.defined()) return {};
  const auto* storage = OnDemandStorage::of(tensor.unsafeGetTensorImpl());
  auto* group = storage == nullptr ? nullptr : dynamic_cast<ParamGroup*>(&storage->group());
  if (group == nullptr) return {};
  return {c10::intrusive_ptr<ParamGroup>::reclaim_copy(group), storage->index()};
}

}  // namespace fsdp::internal
