#include "fully_shard/params/fsdp_param.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/transport/mesh_dims.h"
#include "on_demand/gate_key.h"

#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool has_pieces(const UnitMesh& mesh) {
  return mesh.outer == Outer::kShardOptimizer && replicate_mesh_dim(mesh.data);
}

std::vector<Placement> placements_on(const UnitMesh& mesh, const Shard& cut) {
  if (has_pieces(mesh)) return {cut, Shard{cut.dim}};
  std::vector<Placement> placements(static_cast<size_t>(mesh.data.ndim()), Replicate{});
  placements[static_cast<size_t>(shard_mesh_dim(mesh.data))] = cut;
  return placements;
}

DeviceMesh mesh_of_entry(const UnitMesh& mesh) {
  if (!has_pieces(mesh)) return mesh.data;
  return mesh.data.permute({shard_mesh_dim(mesh.data), *replicate_mesh_dim(mesh.data)});
}

DTensorSpec entry_spec(const at::Tensor& tensor, const Shard& cut, const UnitMesh& mesh) {
  auto placements = placements_on(mesh, cut);
  const auto data = mesh_of_entry(mesh);
  const auto* const meta = find_meta(tensor);
  if (meta == nullptr && !mesh.members)
    return {data, std::move(placements), tensor.sizes().vec(), tensor.strides().vec()};
  const DeviceMesh& own = meta == nullptr ? *mesh.members : meta->spec.mesh();
  const std::vector<Placement> whole(static_cast<size_t>(own.ndim()), Replicate{});
  const auto& by_style = meta == nullptr ? whole : meta->spec.placements();
  placements.insert(placements.begin(), by_style.begin(), by_style.end());
  return {own.beside(data), std::move(placements), tensor.sizes().vec(), tensor.strides().vec()};
}

}  // namespace

FSDPParam::FSDPParam(std::string name, const at::Tensor& tensor, const Shard& cut,
                     const UnitMesh& mesh, std::optional<at::ScalarType> param_dtype)
    : name_(std::move(name)),
      member_(tensor.getIntrusivePtr()),
      entry_(tensor.getIntrusivePtr()),
      spec_(entry_spec(tensor, cut, mesh)),
      meta_(tensor, cut, param_dtype),
      requires_grad_(tensor.requires_grad()) {}

void FSDPParam::set_param_dtype(std::optional<at::ScalarType> dtype) {
  meta_.set_param_dtype(dtype);
  remove_tripwire();  // of the old dtype
  tripwire_.reset();
}

void FSDPParam::set_dtype(at::ScalarType dtype) {
  meta_.set_dtype(dtype);
  remove_tripwire();  // of the old dtype
  tripwire_.reset();
}

void FSDPParam::set_entry(const at::Tensor& entry) { entry_ = WeakTensor(entry.getIntrusivePtr()); }

void FSDPParam::make_member(c10::intrusive_ptr<OnDemandGroup> group, int64_t index,
                            int64_t capacity, c10::Device device) {
  const auto tensor = member(), part = held_part(tensor);
  auto storage = c10::make_intrusive<OnDemandStorage>(std::move(group), index, capacity, device);
  storage_ = storage.get();
  if (casts_inputs_ && meta_.is_cast()) storage->cast_inputs();
  const auto dtype = meta_.member_dtype();
  const auto keys =
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, device)).add(kGateKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), keys,
      c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(part.sizes(), part.strides(), 0);
  if (is_dtensor(tensor)) {
    replace_local(tensor, at::Tensor(std::move(impl)), c10::DispatchKeySet(kGateKey));
  } else {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(impl);
  }
  const auto registered = entry();
  if (registered.defined()) storage_->watch_requires_grad(tensor, registered);
}

void FSDPParam::storage_destroyed(const OnDemandStorage* storage) noexcept {
  if (storage_ == storage) storage_ = nullptr;
}

void FSDPParam::synchronize_requires_grad() {
  synchronize_requires_grad(member_.lock(), entry_.lock());
}

void FSDPParam::synchronize_requires_grad(const TensorPtr& member, const TensorPtr& entry) {
  if (!member || !entry || member->requires_grad() == entry->requires_grad()) {
    if (member) requires_grad_ = member->requires_grad();
    return;
  }
  requires_grad_ = !requires_grad_;  // one of the two was changed
  member->set_requires_grad(requires_grad_);
  entry->set_requires_grad(requires_grad_);
}

const Label& FSDPParam::gradient_label() {
  if (!gradient_label_) {
    gradient_label_ =
        std::make_shared<const std::string>("the gradient of " + description_of(entry()));
  }
  return gradient_label_;
}

bool FSDPParam::is_trainable() {
  const auto member = member_.lock(), entry = entry_.lock();
  synchronize_requires_grad(member, entry);
  const auto& deciding = entry ? entry : member;
  return deciding && deciding->requires_grad();
}

at::Tensor FSDPParam::take_gradient(const std::weak_ptr<ShardWrites>& writes) {
  const auto tensor = member();
  if (!tensor.defined() || !tensor.grad().defined()) return {};
  if (is_untouched_tripwire(tensor.grad())) return {};
  if (!is_untouched_tripwire(tripwire_)) tripwire_ = make_tripwire(tensor, name_, writes);
  return std::exchange(tensor.mutable_grad(), tripwire_);
}

void FSDPParam::drop_gradient() {
  const auto tensor = member();
  if (tensor.defined()) tensor.mutable_grad().reset();
}

void FSDPParam::remove_tripwire() {
  const auto tensor = member();
  if (tensor.defined() && is_untouched_tripwire(tensor.grad())) tensor.mutable_grad().reset();
}

bool any_is_cast(const std::vector<FSDPParam>& params) {
  return std::any_of(params.begin(), params.end(),
                     [](const auto& each) { return each.meta().is_cast(); });
}

}  // namespace fsdp::internal
