// How a DTensor is made of LibTorch's parts: a TensorImpl of global shape without
// storage, with the DTensor dispatch key and a c10::BackendMeta that holds {local tensor,
// spec, owner}. detach(), set_data() and shallow_copy_from() keep it.
#pragma once

#include "dtensor/internal/dtensor_spec.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace fsdp::internal {

// Who manages the storage behind a registry entry. Implemented by fully_shard/.
class DTensorOwner : public c10::intrusive_ptr_target {
 public:
  // Dispatch keys that the DTensors of this owner carry besides their own.
  virtual c10::DispatchKeySet extra_keys() const { return {}; }
  // Called before an operator writes the DTensor's local tensor in place.
  virtual void before_write(const at::Tensor& dtensor) = 0;
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
};

// A new DTensor over `local`, a leaf that does not require grad. Shares memory with
// `local`. Local; no check. With an owner it also carries the owner's extra keys.
at::Tensor make_dtensor(const at::Tensor& local, DTensorSpecPtr spec,
                        c10::intrusive_ptr<DTensorOwner> owner = {});

// A DTensor that is a view of `base`: its keys, version counter and owner, over a view of
// its local tensor.
at::Tensor make_dtensor_view(const at::Tensor& base, const at::Tensor& local, DTensorSpecPtr spec);

// Puts another local tensor of the same shape behind `dtensor`, and behind nothing else
// that shares the old one.
void replace_local(const at::Tensor& dtensor, const at::Tensor& local);

// REQUIRES: is_dtensor(tensor).
const DTensorSpecPtr& spec_of(const at::Tensor& tensor);
// As it is; who hands its values out tells the owner first.
const at::Tensor& local_of(const at::Tensor& tensor);
// Tells the owner, if there is one, that the values of `tensor` are about to be read, or
// written in place. Nothing for plain tensors. Operators tell by themselves
// (dtensor/internal/dispatch.cc).
void tell_read(const at::Tensor& tensor);
void tell_write(const at::Tensor& tensor);
// The version counter of the local tensor; reads no values.
uint32_t local_version_of(const at::Tensor& tensor);
DTensorOwner* owner_of(const at::Tensor& tensor);  // null for none

}  // namespace fsdp::internal
