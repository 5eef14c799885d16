// How a ParamGroup comes to be: ordinary parameters become shards, registry entries and members.
#include "fully_shard/gradient_hook.h"
#include "fully_shard/packed_copy.h"
#include "fully_shard/param_group.h"
#include "fully_shard/registry_entry.h"
#include "fully_shard/unit.h"

#include "dtensor/interpose.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace fsdp::internal {
namespace {

DimZeroExtent extent_of(const at::Tensor& tensor) {
  const auto rows = tensor.size(0);
  return {rows, rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows};
}

}  // namespace

c10::intrusive_ptr<ParamGroup> ParamGroup::create(const DeviceMesh& mesh, const std::vector<at::Tensor>& tensors,
                                                  std::vector<std::string> names, std::shared_ptr<Unit> unit) {
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  install_interposition();
  auto group = c10::make_intrusive<ParamGroup>(mesh, CommContext::of(mesh), unit);
  group->adopt(tensors, std::move(names));
  unit->group = group.get();
  return group;
}

void ParamGroup::adopt(const std::vector<at::Tensor>& tensors, std::vector<std::string> names) {
  std::vector<DimZeroExtent> extents;
  for (const auto& tensor : tensors) extents.push_back(extent_of(tensor));
  layout_ = std::make_unique<PackedLayout>(extents, context_->world());
  shards_ = at::zeros({layout_->row_bytes() + kStampRoom},
                      at::TensorOptions().dtype(at::kByte).device(tensors.front().device()));
  context_->account(&Counters::sharded_bytes, shards_.numel());
  params_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    const auto index = static_cast<int64_t>(i);
    auto spec = intern_spec({mesh_, {Shard{0}}, tensor.sizes().vec(), tensor.strides().vec()});
    params_.push_back({std::move(names[i]), WeakTensor(tensor.getIntrusivePtr()), WeakTensor(tensor.getIntrusivePtr()),
                       nullptr, spec, tensor.scalar_type(), false});
    const auto local = shard_of(tensor, index);
    auto entry = make_dtensor(local, std::move(spec),
                              c10::make_intrusive<RegistryEntry>(
                                  c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), tensor, index));
    entry.set_requires_grad(tensor.requires_grad());
    params_.back().entry = WeakTensor(entry.getIntrusivePtr());
    new_entries_.push_back(std::move(entry));
    make_member(tensor, index);
  }
}

// The part of `tensor` that is this rank's, copied into the shard buffer. Each part has a version counter of its own.
at::Tensor ParamGroup::shard_of(const at::Tensor& tensor, int64_t index) {
  const auto& chunk = layout_->chunk(index);
  const auto rank = context_->rank();
  copy_bytes(shard_data(index), static_cast<const char*>(tensor.const_data_ptr()) + chunk.first(rank),
             chunk.length(rank), shards_.device());
  auto sizes = tensor.sizes().vec();
  const auto row_bytes = extent_of(tensor).row_bytes;
  sizes[0] = row_bytes == 0 ? 0 : chunk.length(rank) / row_bytes;
  auto local = at::empty({0}, tensor.options().requires_grad(false));
  return local.set_(shards_.storage(), chunk.offset / static_cast<int64_t>(tensor.element_size()), sizes);
}

void ParamGroup::make_member(const at::Tensor& tensor, int64_t index) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  const auto bytes = context_->world() * layout_->chunk(index).capacity_bytes;
  auto storage = c10::make_intrusive<OnDemandStorage>(c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), index, bytes,
                                                      tensor.device());
  params_[static_cast<size_t>(index)].storage = storage.get();
  if (context_->world() == 1) storage->fill(shard_data(index));
  const auto member = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), impl->key_set().add(kGateKey),
      tensor.dtype());
  member->set_sizes_and_strides(tensor.sizes(), tensor.strides(), 0);
  impl->shallow_copy_from(member);
  set_gradient_hook(tensor, c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), index);
}

std::vector<at::Tensor> ParamGroup::release_entries() { return std::exchange(new_entries_, {}); }

}  // namespace fsdp::internal
