#include "fully_shard/params/fsdp_param.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/units/module_tree.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"
#include "on_demand/pass.h"

#include <ATen/ops/zeros.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <typeinfo>
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

class Tripwire final : public Touchable {
 public:
  Tripwire(std::string name, std::weak_ptr<ShardWrites> writes)
      : name_(std::move(name)), writes_(std::move(writes)) {}

  void guard(OnDemandStorage& storage) { storage_ = &storage; }
  bool is_untouched() const { return !zeros_.defined(); }

  void touch() override {
    if (zeros_.defined()) return;
    if (current_graph_task() != -1) return become_zeros();
    if (const auto writes = writes_.lock()) writes->copy_discarded();
    TORCH_CHECK_VALUE(false, "the .grad of the member '", name_,
                      "' was read. Gradients of sharded parameters are on module->parameters(), as "
                      "DTensors; read them there (of the whole: "
                      "fsdp::DTensor(parameter.grad()).full_tensor(), collective). An optimizer "
                      "that was built before fully_shard, as in a constructor, has the members: "
                      "optimizer.param_groups()[0].params() = module->parameters() gives it what "
                      "it is to train");
  }
  void storage_destroyed(int64_t, const OnDemandStorage*) noexcept override { storage_ = nullptr; }
  const std::string& parameter_name(int64_t) const override { return name_; }

 private:
  void become_zeros() {
    const RuntimeMode runtime_mode;
    zeros_ = at::zeros({static_cast<int64_t>(storage_->nbytes())},
                       at::TensorOptions().dtype(at::kByte).device(storage_->device()));
    storage_->fill(zeros_.data_ptr());
  }

  std::string name_;
  std::weak_ptr<ShardWrites> writes_;
  OnDemandStorage* storage_ = nullptr;
  at::Tensor zeros_;
};

const Tripwire* tripwire_of(const at::Tensor& gradient) {
  if (!gradient.defined() || !meets_gate(gradient)) return nullptr;
  const auto* storage = OnDemandStorage::behind(gradient);
  if (storage == nullptr) return nullptr;
  const auto& group = storage->group();
  return typeid(group) == typeid(Tripwire) ? static_cast<const Tripwire*>(&group) : nullptr;
}

int64_t batches_of(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  return meta == nullptr || !meta->style ? 1 : meta->style->batches;
}

}  // namespace

ParamMeta::ParamMeta(const at::Tensor& tensor, const Shard& cut,
                     std::optional<at::ScalarType> param_dtype)
    : member_spec_(is_dtensor(tensor) ? std::optional(spec_of(tensor)) : std::nullopt),
      batches_(batches_of(tensor)),
      shape_(held_part(tensor).sizes().vec()),
      cut_(cut),
      dtype_(tensor.scalar_type()),
      param_dtype_(param_dtype) {}

std::vector<int64_t> ParamMeta::shape_with_rows(int64_t rows) const {
  auto shape = shape_;
  shape[static_cast<size_t>(cut_.dim)] = rows;
  return shape;
}

at::ScalarType ParamMeta::member_dtype() const {
  const auto own = decoded_ ? decoded_->dtype : dtype_;
  return at::isFloatingType(own) ? param_dtype_.value_or(own) : own;
}

ShardExtent ParamMeta::extent_of(const std::vector<int64_t>& shape, at::ScalarType dtype) const {
  const auto cut = static_cast<size_t>(cut_.dim);
  ShardExtent extent{
      .rows = shape[cut], .row_bytes = static_cast<int64_t>(c10::elementSize(dtype)), .cut = cut_};
  for (size_t dim = 0; dim < cut; ++dim) extent.blocks *= shape[dim];
  for (size_t dim = cut + 1; dim < shape.size(); ++dim) extent.row_bytes *= shape[dim];
  return extent;
}

ShardExtent ParamMeta::member_extent() const {
  return extent_of(decoded_ ? decoded_->shape : shape_, member_dtype());
}

ShardExtent ParamMeta::gathered_extent() const {
  if (decoded_) return extent(at::kByte);
  if (!codec()) return member_extent();
  auto codes = extent(at::kByte);
  codes.row_bytes = codec_->row_bytes(codes.row_bytes);
  return codes;
}

void ParamMeta::store_codes() {
  const auto codes = gathered_extent();
  decoded_ = Decoded{std::exchange(shape_, {codes.rows, codes.row_bytes}), dtype_};
  dtype_ = at::kByte;
}

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

void FSDPParam::store_codes() {
  meta_.store_codes();
  const auto& shape = meta_.shape();
  spec_ = {spec_.mesh(), spec_.placements(), shape, {shape[1], 1}};
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
  TORCH_CHECK_VALUE(requires_grad_ || !meta_.is_stored_as_codes(), "parameter '", name_,
                    "' can not be trained: it is stored as codes (store_codes())");
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

bool any(const std::vector<FSDPParam>& params, bool (ParamMeta::*is)() const) {
  return std::any_of(params.begin(), params.end(),
                     [is](const FSDPParam& each) { return (each.meta().*is)(); });
}

at::Tensor make_tripwire(const at::Tensor& member, const std::string& name,
                         std::weak_ptr<ShardWrites> writes) {
  const at::Tensor& part = held_part(member);
  auto tripwire = c10::make_intrusive<Tripwire>(name, std::move(writes));
  auto storage = c10::make_intrusive<OnDemandStorage>(tripwire, static_cast<int64_t>(part.nbytes()),
                                                      member.device());
  tripwire->guard(*storage);
  const auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(member.scalar_type(), c10::kStrided, member.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), keys.add(kGateKey),
      member.dtype());
  impl->set_sizes_and_strides(part.sizes(), part.strides());
  at::Tensor local(std::move(impl));
  if (!is_dtensor(member)) return local;
  const KeysOfNewDTensors met_by_gate{c10::DispatchKeySet(kGateKey)};
  return make_dtensor(local, spec_of(member));
}

bool is_untouched_tripwire(const at::Tensor& gradient) {
  const auto* tripwire = tripwire_of(gradient);
  return tripwire != nullptr && tripwire->is_untouched();
}

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
