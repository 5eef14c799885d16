// The storage that a DTensor shows to who reads tensors by it, as LibTorch's torch::save
// does: one that holds the whole value, where that is at hand.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace fsdp::internal {

// While one lives, DTensors show this thread their whole values: each is gathered when it
// is first asked for, a collective over its mesh, and kept until the outermost one ends.
class WholeStorages {
 public:
  WholeStorages();
  ~WholeStorages();
  WholeStorages(const WholeStorages&) = delete;
  WholeStorages& operator=(const WholeStorages&) = delete;
};

// What a DTensor has shown of what its rank holds.
struct ShownStorage {
  const void* data = nullptr;
  uint32_t version = 0;
  c10::Storage storage = {};
};

// Without a WholeStorages: of what this rank holds, if that is all of it, as on a mesh of
// one rank and where all placements are Replicate, kept in `shown`; else null. The
// elements lie as the DTensor's strides say, from the storage's begin. Good until the
// DTensor is written.
const c10::Storage* whole_storage(const at::Tensor& dtensor, ShownStorage& shown);

}  // namespace fsdp::internal
