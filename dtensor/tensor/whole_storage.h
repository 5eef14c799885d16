// The storage that a DTensor shows to who reads tensors by it, as LibTorch's torch::save
// does: one that holds the whole value, where that is at hand.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace fsdp::internal {

// What a DTensor has shown of what its rank holds.
struct ShownStorage {
  const void* data = nullptr;
  uint32_t version = 0;
  c10::Storage storage = {};
};

// Of what this rank holds, if that is all of it, as on a mesh of one rank and where all
// placements are Replicate, kept in `shown`; else null: nothing is gathered, since
// LibTorch comes to an optimizer's states in another order on each rank. The elements lie
// as the DTensor's strides say, from the storage's begin. Good until the DTensor is
// written. Local.
const c10::Storage* whole_storage(const at::Tensor& dtensor, ShownStorage& shown);

}  // namespace fsdp::internal
