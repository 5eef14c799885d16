// A DTensor whose part of the whole has no values yet: its local tensor is deferred, or
// on the meta device. What reads or writes values throws, and says which parameter it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::internal {

// REQUIRES: a DTensor without owner, whose local tensor is on the meta device.
void make_deferred_part(const at::Tensor& dtensor, std::string name);
bool is_deferred_part(const at::Tensor& tensor);

// Its local tensor is `local` from now on, of the mesh's device. REQUIRES:
// is_deferred_part().
void give_part(const at::Tensor& dtensor, const at::Tensor& local);
// Somebody else answers for its values from now on. REQUIRES: is_deferred_part().
void release_part(const at::Tensor& dtensor);

}  // namespace fsdp::internal
