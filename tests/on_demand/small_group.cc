#include "tests/on_demand/small_group.h"

#include "on_demand/gate_key.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace fsdp::testing {

c10::intrusive_ptr<SmallGroup> SmallGroup::take(const std::vector<at::Tensor>& tensors) {
  internal::install_gate();
  auto group = c10::make_intrusive<SmallGroup>();
  for (size_t i = 0; i < tensors.size(); ++i) group->adopt(tensors[i], static_cast<int64_t>(i));
  return group;
}

void SmallGroup::adopt(const at::Tensor& tensor, int64_t index) {
  c10::NoGradGuard no_grad;
  values_.push_back(tensor.detach().clone());
  entries_.push_back(at::empty_like(values_.back()));
  if (tensor.requires_grad()) entries_.back().set_requires_grad(true);
  members_.push_back(tensor.unsafeGetTensorImpl());
  auto storage = c10::make_intrusive<internal::OnDemandStorage>(
      c10::intrusive_ptr<internal::OnDemandGroup>::reclaim_copy(this), index,
      static_cast<int64_t>(tensor.nbytes()), tensor.device());
  storages_.push_back(storage.get());
  const auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, tensor.device()));
  const auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))),
      keys.add(internal::kGateKey), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), 0);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(impl);
}

void SmallGroup::touch() {
  ++touches_;
  if (when_touched) when_touched();
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (storages_[i] != nullptr) storages_[i]->fill(values_[i].data_ptr());
  }
  if (is_ready_after_touch) mark_ready(internal::current_pass());
}

void SmallGroup::synchronize_metadata(int64_t index, c10::TensorImpl* impl) {
  ++synchronizations_;
  if (!is_member(index, impl)) return;
  impl->set_requires_grad(entries_[static_cast<size_t>(index)].requires_grad());
}

void SmallGroup::evict_and_poison() {
  if (pinned()) return;
  ++evictions_;
  empty();
}

void SmallGroup::empty() {
  clear_ready();
  for (auto* storage : storages_) {
    if (storage != nullptr) storage->empty();
  }
}

void SmallGroup::watch_requires_grad(const std::vector<at::Tensor>& members) {
  for (size_t i = 0; i < storages_.size(); ++i)
    storages_[i]->watch_requires_grad(members[i], entries_[i]);
}

}  // namespace fsdp::testing
