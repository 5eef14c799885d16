// How a ParamGroup comes to be: ordinary parameters become shards, registry entries and
// members.
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/step/gradient_hook.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/units/unit.h"
#include "on_demand/gate_key.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>

#include <utility>

namespace fsdp::internal {

c10::intrusive_ptr<ParamGroup> ParamGroup::create(const DeviceMesh& mesh,
                                                  const std::vector<at::Tensor>& tensors,
                                                  std::vector<std::string> names,
                                                  std::shared_ptr<Unit> unit) {
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  install_gate();
  auto group = c10::make_intrusive<ParamGroup>(mesh, CommContext::of(mesh), unit);
  group->adopt(tensors, std::move(names));
  unit->group = group.get();
  return group;
}

void ParamGroup::adopt(const std::vector<at::Tensor>& tensors, std::vector<std::string> names) {
  params_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    params_.push_back(
        {std::move(names[i]), WeakTensor(tensor.getIntrusivePtr()),
         WeakTensor(tensor.getIntrusivePtr()), nullptr,
         intern_spec({mesh_, {Shard{0}}, tensor.sizes().vec(), tensor.strides().vec()}),
         tensor.scalar_type()});
  }
  open_shards(tensors.front().device());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto& chunk = layout_->chunk(index);
    copy_bytes(
        shard_data(index),
        static_cast<const char*>(tensors[i].const_data_ptr()) + chunk.first(context_->rank()),
        chunk.length(context_->rank()), shards_.device());
    auto owner = c10::make_intrusive<RegistryEntry>(
        c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), tensors[i], index);
    auto entry = make_dtensor(local_view(index), params_[i].spec, std::move(owner));
    entry.set_requires_grad(tensors[i].requires_grad());
    params_[i].entry = WeakTensor(entry.getIntrusivePtr());
    new_entries_.push_back(std::move(entry));
    make_member(tensors[i], index);
    attach_hooks(tensors[i], index);
  }
}

// A fresh layout and shard buffer for the parameters as they are.
void ParamGroup::open_shards(c10::Device device) {
  std::vector<DimZeroExtent> extents;
  for (const auto& param : params_) {
    int64_t row_bytes = static_cast<int64_t>(c10::elementSize(param.dtype));
    for (size_t dim = 1; dim < param.spec->shape.size(); ++dim) row_bytes *= param.spec->shape[dim];
    extents.push_back({param.spec->shape.front(), row_bytes});
  }
  layout_ = std::make_unique<PackedLayout>(extents, context_->world());
  if (shards_.defined()) context_->account(&Counters::sharded_bytes, -shards_.numel());
  shards_ = at::zeros({layout_->row_bytes() + kStampRoom},
                      at::TensorOptions().dtype(at::kByte).device(device));
  context_->account(&Counters::sharded_bytes, shards_.numel());
}

// This rank's part of parameter `index` in the shard buffer. Each part has a version
// counter of its own.
at::Tensor ParamGroup::local_view(int64_t index) const {
  const auto& param = params_[static_cast<size_t>(index)];
  const auto& chunk = layout_->chunk(index);
  auto sizes = param.spec->shape;
  const auto row_bytes = sizes.front() == 0 ? 0 : chunk.total_bytes / sizes.front();
  sizes.front() = row_bytes == 0 ? 0 : chunk.length(context_->rank()) / row_bytes;
  auto local = at::empty({0}, shards_.options().dtype(param.dtype));
  return local.set_(shards_.storage(), chunk.offset / static_cast<int64_t>(local.element_size()),
                    sizes);
}

void ParamGroup::make_member(const at::Tensor& tensor, int64_t index) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  auto& param = params_[static_cast<size_t>(index)];
  const auto bytes = context_->world() * layout_->chunk(index).capacity_bytes;
  auto storage = c10::make_intrusive<OnDemandStorage>(
      c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), index, bytes, tensor.device());
  param.storage = storage.get();
  if (context_->world() == 1) storage->fill(shard_data(index));
  const auto keys =
      c10::DispatchKeySet(c10::computeDispatchKey(param.dtype, c10::kStrided, tensor.device()));
  const auto member = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), keys.add(kGateKey),
      c10::scalarTypeToTypeMeta(param.dtype));
  member->set_sizes_and_strides(tensor.sizes(), tensor.strides(), 0);
  impl->shallow_copy_from(member);
}

void ParamGroup::attach_hooks(const at::Tensor& member, int64_t index) {
  remove_tripwire_before_accumulation(member);
  set_gradient_hook(member, c10::intrusive_ptr<ParamGroup>::reclaim_copy(this), index);
}

std::vector<at::Tensor> ParamGroup::release_entries() { return std::exchange(new_entries_, {}); }

}  // namespace fsdp::internal
