#include "on_demand/on_demand_storage.h"

#include <torch/headeronly/version.h>

#include <typeinfo>

namespace fsdp::internal {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
// LibTorch can set the flag that makes raw access throw, but not clear it before 2.15.
// Naming a private member in an explicit instantiation is allowed, and gives us a pointer
// to it.
struct ThrowFlag {
  friend constexpr auto member_of(ThrowFlag);
};
template <auto Member>
struct Expose {
  friend constexpr auto member_of(ThrowFlag) { return Member; }
};
template struct Expose<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void allow_raw_access(c10::StorageImpl& storage) { storage.*member_of(ThrowFlag{}) = false; }
#else
void allow_raw_access(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

std::atomic<bool> evict_after_operator{false};

}  // namespace

OnDemandStorage::OnDemandStorage(c10::intrusive_ptr<OnDemandGroup> group, int64_t index,
                                 int64_t nbytes, c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), nullptr,
                       /*resizable=*/false),
      group_(std::move(group)),
      index_(index) {
  empty();
}

OnDemandStorage::~OnDemandStorage() { group_->storage_destroyed(index_, this); }

OnDemandStorage* OnDemandStorage::of(const c10::TensorImpl* impl) {
  if (!impl->has_storage()) return nullptr;
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage != nullptr && typeid(*storage) == typeid(OnDemandStorage)
             ? static_cast<OnDemandStorage*>(storage)
             : nullptr;
}

void OnDemandStorage::fill(void* data) {
  allow_raw_access(*this);
  set_data_ptr_noswap(c10::DataPtr(data, device()));
}

void OnDemandStorage::empty() {
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  if (nbytes() == 0) return;
  release_data_and_set_meta_custom_data_ptr_error_msg_(
      "parameter '" + group_->parameter_name(index_) +
      "' is sharded: its memory is empty outside operators. Use an operator on it first, or read "
      "its registry entry's "
      "to_local() or full_tensor().");
}

void set_evict_after_every_operator(bool enabled) { evict_after_operator = enabled; }
bool evict_after_every_operator() { return evict_after_operator.load(std::memory_order_relaxed); }

}  // namespace fsdp::internal
