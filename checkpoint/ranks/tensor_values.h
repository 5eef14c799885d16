// The values of tensors that may be distributed, read and written where they lie, so that
// who manages them knows.
#pragma once

#include "checkpoint/ranks/world.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal::checkpoint {

// Of a DTensor: gathered, or where it lies if every rank has all of it. Of a plain
// tensor: rank 0's. Plain, without gradient; may share memory with `tensor`. Collective
// over the DTensor's mesh, or over `world`.
at::Tensor whole_value(const at::Tensor& tensor, const World& world);

// This rank's part of a DTensor, up to date; a plain tensor as it is. Without gradient;
// shares memory. Local.
at::Tensor local_value(const at::Tensor& tensor);

// The same to be written, after its owner was told, who is told again when it was
// written. Whoever owns a registry entry counts the writes, so every rank calls them, an
// empty part or not. Local.
at::Tensor open_for_writing(const at::Tensor& tensor);
void close_after_writing(const at::Tensor& tensor);

}  // namespace fsdp::internal::checkpoint
