// One parameter of a group (PyTorch's FSDPParam): its member and registry entry, both
// known weakly, the member's on-demand storage, and what was noted of its gradient.
//
//   member.requires_grad and entry.requires_grad mean the same: whichever was changed since both
//   were last seen gives the other its value (synchronize_requires_grad).
//
// Local. Not thread-safe.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_spec.h"
#include "fully_shard/gather_codec.h"
#include "fully_shard/policies.h"
#include "fully_shard/transport/packed_layout.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

// The shape and dtypes of a parameter (PyTorch's TensorMeta), where it lies without its
// unit, and how many bytes its shards are. Local.
class ParamMeta {
 public:
  // Of `tensor`, plain or tensor-parallel, which the unit cuts so; the dimension is not
  // negative. With `param_dtype` a floating member has that dtype, and the
  // registry entry keeps the tensor's.
  ParamMeta(const at::Tensor& tensor, const Shard& cut, std::optional<at::ScalarType> param_dtype);

  // What the member is without the unit: where it lies over its own mesh; null where it
  // is plain.
  const std::optional<DTensorSpec>& member_spec() const { return member_spec_; }
  // On how many ranks of its own mesh the member has a batch (ExpertParallel), each of
  // which counts in the mean of the gradients.
  int64_t batches() const { return batches_; }
  // Of what the unit shards: the member, or this rank's part of a tensor-parallel one.
  const std::vector<int64_t>& shape() const { return shape_; }
  const Shard& cut() const { return cut_; }
  // Of a part that has so many indices of the sharded dimension.
  std::vector<int64_t> shape_with_rows(int64_t rows) const;

  at::ScalarType dtype() const { return dtype_; }  // of the entry and the shards
  at::ScalarType member_dtype() const;
  // Whether the member may have a dtype of its own.
  bool is_cast() const { return param_dtype_.has_value(); }
  void set_dtype(at::ScalarType dtype) { dtype_ = dtype; }
  void set_param_dtype(std::optional<at::ScalarType> dtype) { param_dtype_ = dtype; }

  // What is gathered in the place of the values; null: they are.
  const GatherCodec* codec() const { return is_codec_left_out_ ? nullptr : codec_.get(); }
  void set_codec(std::shared_ptr<const GatherCodec> codec) { codec_ = std::move(codec); }
  // Full precision: there is none from the next gather on, unless codes are stored.
  void leave_codec_out(bool leave_out) { is_codec_left_out_ = leave_out && !decoded_; }
  bool has_codec() const { return codec_ != nullptr; }
  // From now on the shards are codes: shape() is [rows, bytes of a row's codes], of dtype
  // Byte. The member stays what it is. REQUIRES: a codec, and cut along dimension 0.
  void store_codes();
  bool is_stored_as_codes() const { return decoded_.has_value(); }
  // Whether members are other bytes than the shards; and what is gathered is.
  bool is_converted() const { return is_cast() || is_encoded(); }
  bool is_staged() const { return is_converted() && !is_stored_as_codes(); }
  // Whether codes are gathered; and whether shards are encoded for it.
  bool is_encoded() const { return codec() != nullptr; }
  bool is_encoded_to_be_sent() const { return is_encoded() && !is_stored_as_codes(); }

  // Of values of `dtype`.
  ShardExtent extent(at::ScalarType dtype) const { return extent_of(shape_, dtype); }
  ShardExtent own_extent() const { return extent(dtype_); }  // of the shards
  ShardExtent member_extent() const;
  // Of what is gathered: codes, or values in the member's dtype.
  at::ScalarType gathered_dtype() const { return codec() ? at::kByte : member_dtype(); }
  ShardExtent gathered_extent() const;

 private:
  ShardExtent extent_of(const std::vector<int64_t>& shape, at::ScalarType dtype) const;

  std::optional<DTensorSpec> member_spec_;
  int64_t batches_;
  std::vector<int64_t> shape_;
  Shard cut_;
  at::ScalarType dtype_;
  std::optional<at::ScalarType> param_dtype_;
  std::shared_ptr<const GatherCodec> codec_;
  bool is_codec_left_out_ = false;
  struct Decoded {
    std::vector<int64_t> shape;
    at::ScalarType dtype;
  };
  std::optional<Decoded> decoded_;  // what shards were before they became codes
};

class ShardWrites;

// Over what a unit shards its parameters.
struct UnitMesh {
  DeviceMesh data;                      // of shards and replicas: see shard_mesh_dim()
  std::optional<DeviceMesh> members{};  // of the tensor-parallel parameters, if there are
  Outer outer = Outer::kReplicate;
};

class FSDPParam {
 public:
  // `tensor`, plain or tensor-parallel, becomes the member, cut so over the unit's mesh;
  // the dimension is not negative. With `param_dtype` a floating member
  // has that dtype, and the entry keeps the tensor's. Throws ValueError where the mesh
  // and a tensor-parallel member's own are not slices of a common one.
  FSDPParam(std::string name, const at::Tensor& tensor, const Shard& cut, const UnitMesh& mesh,
            std::optional<at::ScalarType> param_dtype);

  const std::string& name() const { return name_; }
  // Of the entry: over the dimensions of the tensor-parallel mesh, then those of the
  // unit's own, since the order of cuts is the order of mesh dimensions; with HFSDP those
  // are the inner one and then the outer one, both of which cut. A plain
  // parameter beside tensor-parallel ones is the same on all their ranks.
  const DTensorSpec& spec() const { return spec_; }
  const ParamMeta& meta() const { return meta_; }
  ParamMeta& meta() { return meta_; }
  // From the next make_member() on; unset: the member has the entry's dtype.
  void set_param_dtype(std::optional<at::ScalarType> dtype);
  // The entry is to be one of codes. REQUIRES: frozen, plain, as ParamMeta has it.
  void store_codes();
  // Operators get their floating inputs in the member's dtype, where it is one of its
  // own. REQUIRES: no member yet.
  void cast_inputs() { casts_inputs_ = true; }
  at::Tensor member() const { return at::Tensor(member_.lock()); }  // undefined once it died
  at::Tensor entry() const { return at::Tensor(entry_.lock()); }
  bool is_member(const c10::TensorImpl* impl) const { return member_._unsafe_get_target() == impl; }
  bool is_entry(const c10::TensorImpl* impl) const { return entry_._unsafe_get_target() == impl; }

  // Without values: the tensor of the meta device that it was; undefined where it has
  // some.
  const at::Tensor& without_values() const { return without_values_; }
  void set_without_values(at::Tensor tensor) { without_values_ = std::move(tensor); }

  void rename(std::string name) { name_ = std::move(name); }
  void set_dtype(at::ScalarType dtype);
  void set_entry(const at::Tensor& entry);
  // Gives the member a new, empty on-demand storage of `capacity` bytes on `device`,
  // parameter `index` of `group`; its handles stay.
  void make_member(c10::intrusive_ptr<OnDemandGroup> group, int64_t index, int64_t capacity,
                   c10::Device device);
  OnDemandStorage* storage() const { return storage_; }  // null once its last tensor died
  void storage_destroyed(const OnDemandStorage* storage) noexcept;

  void synchronize_requires_grad();
  // By the registry entry; by the member where the entry died.
  bool is_trainable();
  // Of the entry's gradients. REQUIRES: the entry lives.
  const Label& gradient_label();

  // Takes the full gradient off the member, and leaves a tripwire there
  // (make_tripwire()); undefined for none.
  at::Tensor take_gradient(const std::weak_ptr<ShardWrites>& writes);
  void drop_gradient();
  // The tripwire goes before a forward whose backward brings the next gradient.
  void remove_tripwire();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using TensorPtr = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // Null for a handle that died.
  void synchronize_requires_grad(const TensorPtr& member, const TensorPtr& entry);

  std::string name_;
  WeakTensor member_, entry_;
  OnDemandStorage* storage_ = nullptr;
  DTensorSpec spec_;
  ParamMeta meta_;
  bool casts_inputs_ = false;
  bool requires_grad_;  // of both handles, when last seen
  at::Tensor without_values_;
  at::Tensor tripwire_;  // made for the first gradient, as the label
  Label gradient_label_;
};

// any(params, &ParamMeta::is_staged)
bool any(const std::vector<FSDPParam>& params, bool (ParamMeta::*is)() const);

// What stands in a member's .grad after a backward: the right shape, and an error when it
// is touched. An optimizer built before fully_shard holds members; without this it would
// find no gradients and silently do nothing.
//
// Inside a backward it is no error but zeros: a second backward through a retained graph
// adds to it.
class ShardWrites;

// Of the shape and dtype of `member`, the parameter `name`. Touching it outside a
// backward discards what was written to the group's unsharded copy, by `writes`, and
// throws ValueError. Local.
at::Tensor make_tripwire(const at::Tensor& member, const std::string& name,
                         std::weak_ptr<ShardWrites> writes);
// A tripwire that no backward has added to.
bool is_untouched_tripwire(const at::Tensor& gradient);

// Notices a member that its module no longer holds: after `linear->weight = other` the
// model computes with `other`, and the sharded parameter would silently train no more.
// Handles can not be watched, but they can be counted: a parameter that the model held
// when it was sharded, and that now only its registry entry holds, was reassigned.
//
// Whatever else holds a member (a graph, a copy of the handle) delays the discovery.
// Silent by design: a parameter that is frozen, that no living module registers any more,
// or that operators reach through its registry entry (ParameterList,
// named_parameters()["w"]). Local.
class FSDPParamGroup;
struct RegistrySlot;

class MemberWatch {
 public:
  MemberWatch() = default;  // watches nothing
  // `slots`: where the parameter's entry is registered.
  explicit MemberWatch(const std::vector<RegistrySlot>& slots);

  // An operator was given the registry entry: the model may well hold no member.
  void entry_was_used() { places_.clear(); }
  bool is_lost(const at::Tensor& member, const at::Tensor& entry) const;

 private:
  struct Place {
    std::weak_ptr<torch::nn::Module> module;
    std::string key;
  };
  std::vector<Place> places_;  // where the entry is registered; empty when nothing is watched
};

// Throws ValueError for the first parameter of `group` whose member was reassigned; every
// time, since what follows trains a model that lacks the parameter.
void check_members_are_held(const FSDPParamGroup& group);

}  // namespace fsdp::internal
