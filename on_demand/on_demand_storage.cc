#include "on_demand/on_demand_storage.h"

#include "on_demand/raw_access.h"

#include <atomic>
#include <utility>

namespace fsdp::internal {
namespace {

std::string error_of_raw_access(const OnDemandStorage& storage) {
  return "parameter '" + storage.parameter_name() +
         "' is sharded: its memory is empty outside operators. Keep it unsharded while a pointer "
         "is used, fsdp::Unsharded full(parameter), or read its registry entry's to_local() or "
         "full_tensor().";
}

std::atomic<bool> evict_after_operator{false};

}  // namespace

OnDemandStorage::OnDemandStorage(c10::intrusive_ptr<OnDemandGroup> group, int64_t index,
                                 int64_t nbytes, c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), nullptr,
                       /*resizable=*/false),
      writable_(group.get()),
      index_(index) {
  group_ = std::move(group);
  renamed();
}

OnDemandStorage::OnDemandStorage(c10::intrusive_ptr<Touchable> group, int64_t nbytes,
                                 c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), nullptr,
                       /*resizable=*/false),
      group_(std::move(group)),
      writable_(nullptr),
      index_(0) {
  renamed();
}

OnDemandStorage::~OnDemandStorage() { group_->storage_destroyed(index_, this); }

void OnDemandStorage::watch_requires_grad(const at::Tensor& member, const at::Tensor& entry) {
  watched_ = Watched{WeakTensor(member.getIntrusivePtr()), WeakTensor(entry.getIntrusivePtr()),
                     entry.requires_grad()};
}

void OnDemandStorage::fill(void* data) {
  allow_raw_access(*this);
  set_data_ptr_noswap(c10::DataPtr(data, device()));
}

void OnDemandStorage::empty() {
  if (nbytes() != 0) refuse_raw_access_again(*this, [this] { return error_of_raw_access(*this); });
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
}

void OnDemandStorage::renamed() {
  if (nbytes() == 0) return;
  const bool is_filled = _mutable_data_ptr_no_checks().get() != nullptr;
  refuse_raw_access(*this, error_of_raw_access(*this));
  if (is_filled) allow_raw_access(*this);
}

void set_evict_after_every_operator(bool enabled) { evict_after_operator = enabled; }
bool evict_after_every_operator() { return evict_after_operator.load(std::memory_order_relaxed); }

void TouchedGroups::touch(Touchable& group) {
  await_failed_backward(group);
  group.touch();
}

void TouchedGroups::await_failed_backwards() {
  for (auto* group : groups_) await_failed_backward(*group);
}

void TouchedGroups::await_failed_backward(Touchable& group) {
  if (auto* const failed = group.failed_backward()) await_end_unpinned(*failed);
}

void TouchedGroups::await_end_unpinned(OpenBackward& backward) {
  struct Unpinned {
    explicit Unpinned(TouchedGroups& groups) : groups(groups) {
      for (auto* each : groups.groups_) each->unpin();
    }
    ~Unpinned() {
      for (auto* each : groups.groups_) each->pin();
    }
    TouchedGroups& groups;
  };
  const Unpinned unpinned(*this);
  backward.await_end();
}

void TouchedGroups::evict_if_outermost() {
  if (OuterOperator::is_running()) return;
  for (auto* group : groups_) group->evict_and_poison();
}

int64_t& OuterOperator::depth() {
  thread_local int64_t depth = 0;
  return depth;
}

}  // namespace fsdp::internal
