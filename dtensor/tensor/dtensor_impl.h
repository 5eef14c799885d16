// How a DTensor is made of LibTorch's parts: a TensorImpl of global shape without
// storage, with the DTensor dispatch key and a c10::BackendMeta that holds {local tensor,
// spec, owner, style, whether it comes from a parameter}. detach(), set_data() and
// shallow_copy_from() keep it.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"
#include "dtensor/tensor/scalar_hash.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::internal {

// Below autograd: operators on DTensors (kernels/dispatch.cc).
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::CustomRNGKeyId;
// Above all others, and included by threads that have generators of their own: views
// (kernels/view_replay.cc) and random operators (random/thread_generators.h). All else
// falls through. LibTorch registers nothing for it.
inline constexpr c10::DispatchKey kFirstKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// The keys that a kernel under `key`, which a call met with `keys`, passes on.
inline c10::DispatchKeySet keys_below(c10::DispatchKey key, c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
}

// Registers the kernels under the keys. Idempotent, thread-safe; called when the first
// DTensor is made.
void install_dtensor_kernels();

// Who manages the storage behind a registry entry. Implemented by fully_shard/.
class DTensorOwner : public c10::intrusive_ptr_target {
 public:
  // Dispatch keys that the DTensors of this owner carry besides their own.
  virtual c10::DispatchKeySet extra_keys() const { return {}; }
  // Of the parameter whose registry entry the DTensor is, or a view of it. Null for what
  // is no parameter.
  virtual const std::string* parameter_name() const { return nullptr; }
  // What messages call that parameter, the same on all ranks of its mesh and unlike any
  // other parameter there; empty for what is no parameter.
  virtual std::string description() const { return {}; }
  // Of a parameter that is stored as codes: what they are called; else empty.
  virtual std::string codec() const { return {}; }
  // Called before an operator writes the DTensor's local tensor in place.
  virtual void before_write(const at::Tensor& dtensor) = 0;
  // Called when an operator has written it; where it threw, not at all. Not where nobody
  // hears_end_of_write().
  virtual void after_write(const at::Tensor& /*dtensor*/) {}
  virtual bool hears_end_of_write() const { return false; }
  // Whether the local tensor is a copy of what the DTensor is a view of.
  virtual bool shows_a_copy() const { return false; }
  // Called when to_local() gives out the local tensor, which may then be written at any
  // time.
  virtual void local_given_out() {}
  // Of a parameter: whether `dtensor`, which is it or a view of it, shows all of it.
  virtual bool shows_all(const at::Tensor& /*dtensor*/) const { return false; }
  // Of a parameter: called before an operator writes it with plain tensors without
  // dimensions, such as a learning rate, whose numbers have this hash (scalar_hash.h).
  virtual void before_factors(uint64_t /*hash*/) {}
  // Of a parameter: called after an operator put other values in the place of those of
  // `dtensor` (copy_, fill_, zero_, set_). `source` is the plain tensor that they are of,
  // of which this rank has kept its part, or undefined where they are of none.
  virtual void after_overwrite(const at::Tensor& /*dtensor*/, const at::Tensor& /*source*/) {}
  // Called before set_data gives `dtensor` the data of `from`, which it may change into
  // what the DTensor is to become; throws to refuse.
  virtual void before_set_data(const at::Tensor& dtensor, const at::Tensor& from) = 0;
  // The tensor that stands for `dtensor` in differentiable operators (called by the
  // gate), or undefined for none.
  virtual at::Tensor substitute(const at::Tensor& dtensor) = 0;
  // Called before an operator, to_local(), redistribute() or printing reads the DTensor's
  // local tensor, which must then be up to date. Local.
  virtual void before_read(const at::Tensor& /*dtensor*/) {}
  // Called before the gate computes, outside autograd, with the whole value of `dtensor`
  // instead of the DTensor.
  virtual void before_whole_read(const at::Tensor& /*dtensor*/) {}
  // Calls `view`, which takes a view of what substitute() gave. It may read values, so
  // they are there while it runs. Collective where `view` is, or where they have to be
  // fetched.
  virtual void while_readable(const std::function<void()>& view) { view(); }
};

// What layers above know of a parameter, and of its views, which share it.
struct DTensorStyle : c10::intrusive_ptr_target {
  std::string path;            // of the parameter, in the model that it became a DTensor in
  uint32_t number_of_model{};  // among those of the mesh, the same on all its ranks
  int64_t batches = 1;         // whose gradients meet in it, on the ranks of its mesh
};
using DTensorStylePtr = c10::intrusive_ptr<DTensorStyle>;

// What messages call a DTensor that is no parameter, such as the gradient of one: the
// same on all ranks of its mesh. Null for none.
using Label = std::shared_ptr<const std::string>;

struct DTensorMeta final : c10::BackendMeta {
  DTensorMeta(at::Tensor local_tensor, DTensorSpec spec_ptr,
              c10::intrusive_ptr<DTensorOwner> owner_ptr, DTensorStylePtr style_ptr,
              bool is_from_parameter, const ScalarHash& scalars_taken, Label label_given = {})
      : local(std::move(local_tensor)),
        spec(std::move(spec_ptr)),
        owner(std::move(owner_ptr)),
        style(std::move(style_ptr)),
        from_parameter(is_from_parameter),
        scalars(scalars_taken),
        label(std::move(label_given)) {}

  // A registry entry, or a view of one.
  bool is_of_parameter() const { return owner && owner->parameter_name() != nullptr; }

  at::Tensor local;
  DTensorSpec spec;
  c10::intrusive_ptr<DTensorOwner> owner;  // null for none
  DTensorStylePtr style;                   // null for none
  // Whether it is the registry entry of a parameter, a view of one, or was made or
  // written by an operator that met one or what comes from one: beside it a plain tensor
  // is this rank's own (implicit_replication.h).
  bool from_parameter;
  ScalarHash scalars;  // that went into it, where it comes from a parameter
  Label label;
};

// What the DTensors that a thread makes have besides what they are made of.
struct NewDTensors {
  c10::DispatchKeySet keys;
  bool from_parameter = false;
  ScalarHash scalars;

  static NewDTensors& current();
};

// Further dispatch keys of every DTensor that this thread makes while it lives: results
// are then met by who met the operands.
class KeysOfNewDTensors {
 public:
  explicit KeysOfNewDTensors(c10::DispatchKeySet keys) : before_(NewDTensors::current().keys) {
    NewDTensors::current().keys = before_ | keys;
  }
  ~KeysOfNewDTensors() { NewDTensors::current().keys = before_; }
  KeysOfNewDTensors(const KeysOfNewDTensors&) = delete;
  KeysOfNewDTensors& operator=(const KeysOfNewDTensors&) = delete;

 private:
  c10::DispatchKeySet before_;
};

// While one lives that was given true, what this thread makes comes from a parameter, and
// from these numbers, too.
class NewFromParameter {
 public:
  NewFromParameter(bool from_parameter, const ScalarHash& scalars)
      : before_(NewDTensors::current().from_parameter),
        scalars_before_(NewDTensors::current().scalars) {
    NewDTensors::current().from_parameter = before_ || from_parameter;
    NewDTensors::current().scalars.join(scalars);
  }
  ~NewFromParameter() {
    NewDTensors::current().from_parameter = before_;
    NewDTensors::current().scalars = scalars_before_;
  }
  NewFromParameter(const NewFromParameter&) = delete;
  NewFromParameter& operator=(const NewFromParameter&) = delete;

 private:
  bool before_;
  ScalarHash scalars_before_;
};

// Null for a plain tensor, and an undefined one. An optimizer's step asks a dozen times
// per parameter.
inline const DTensorMeta* find_meta(const at::Tensor& tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has(kDTensorKey)) return nullptr;
  return static_cast<const DTensorMeta*>(impl->get_backend_meta());
}

// What this rank holds of `tensor`: its local tensor, or a plain tensor itself.
inline const at::Tensor& held_part(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  return meta == nullptr ? tensor : meta->local;
}

// A new DTensor over `local`, a leaf that does not require grad. Shares memory with
// `local`. Local; no check. With an owner it also carries the owner's extra keys, and
// comes from a parameter where the owner is that of one.
at::Tensor make_dtensor(const at::Tensor& local, DTensorSpec spec,
                        c10::intrusive_ptr<DTensorOwner> owner = {});

// A DTensor that is a view of `base`: its keys, version counter, owner, style and origin,
// over a view of its local tensor.
at::Tensor make_dtensor_view(const at::Tensor& base, const at::Tensor& local, DTensorSpec spec);

// Gives `dtensor` the shape, the placements and the local tensor of `view`, a view of it,
// in place. It keeps its style.
void become_view(const at::Tensor& dtensor, const at::Tensor& view);

// Puts another local tensor of the same shape behind `dtensor`, and behind nothing else
// that shares the old one.
void replace_local(const at::Tensor& dtensor, const at::Tensor& local);

// Puts `local`, which may be of another dtype and device, behind `dtensor` as above, and
// gives it `keys` besides its own.
void replace_local(const at::Tensor& dtensor, const at::Tensor& local, c10::DispatchKeySet keys);

// REQUIRES: is_dtensor(dtensor), as the next three. Of all that shares its metadata, as
// detached aliases do.
void set_from_parameter(const at::Tensor& dtensor);
// Those that went into what was written. Entries have none.
void set_scalar_hash(const at::Tensor& dtensor, const ScalarHash& scalars);
void set_style(const at::Tensor& dtensor, DTensorStylePtr style);
void set_label(const at::Tensor& dtensor, Label label);
// Null for none. Not the keys that the owner gives.
void set_owner(const at::Tensor& dtensor, c10::intrusive_ptr<DTensorOwner> owner);

// For a tensor that became a DTensor in place: a plain TensorImpl, which keeps its
// metadata until the last weak reference is gone. One of these, owned by what goes with
// the last handle (the tensor's autograd metadata), lets go of it then. So what the local
// tensor owns may refer to the DTensor weakly.
class LettingGoOfMeta {
 public:
  explicit LettingGoOfMeta(const at::Tensor& dtensor) : impl_(dtensor.unsafeGetTensorImpl()) {}
  ~LettingGoOfMeta();
  LettingGoOfMeta(const LettingGoOfMeta&) = delete;
  LettingGoOfMeta& operator=(const LettingGoOfMeta&) = delete;

 private:
  c10::TensorImpl* impl_;
};

// REQUIRES: is_dtensor(tensor), as all below.
inline const DTensorMeta& meta_of(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  TORCH_INTERNAL_ASSERT(meta != nullptr, "not a DTensor, or one that lost its metadata");
  return *meta;
}
inline const DTensorSpec& spec_of(const at::Tensor& tensor) { return meta_of(tensor).spec; }
// As it is; who hands its values out tells the owner first.
inline const at::Tensor& local_of(const at::Tensor& tensor) { return meta_of(tensor).local; }
// What tells it from other DTensors of its shape: the parameter that it is or is a view
// of, or its label; empty for none.
std::string description_of(const at::Tensor& dtensor);
// The version counter of the local tensor; reads no values.
uint32_t local_version_of(const at::Tensor& tensor);
// Null for none.
inline DTensorOwner* owner_of(const at::Tensor& tensor) { return meta_of(tensor).owner.get(); }

// Tells the owner, if there is one, that the values of `tensor` are about to be read, or
// written in place, or have been. Nothing for plain tensors. Operators tell by themselves
// (dtensor/kernels/dispatch.cc).
inline void tell_read(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  if (meta != nullptr && meta->owner) meta->owner->before_read(tensor);
}
inline void tell_write(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  if (meta != nullptr && meta->owner) meta->owner->before_write(tensor);
}
inline void tell_written(const at::Tensor& tensor) {
  const auto* const meta = find_meta(tensor);
  if (meta != nullptr && meta->owner) meta->owner->after_write(tensor);
}

}  // namespace fsdp::internal
