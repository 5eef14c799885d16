// Whole values of distributed tensors, in a given order: what lies in one unit of
// fully_shard() and follows each other is gathered in one collective, as the unit itself
// would be, and so are plain tensors that rank 0 sends.
//
//   WholeValues values(tensors, world);
//   for (size_t i = 0; i < tensors.size(); ++i) write(values.next());
#pragma once

#include "checkpoint/plan/state_items.h"
#include "checkpoint/ranks/world.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

// Memory that one use after another has: allocators do not always give back what many
// buffers of different sizes took in turn.
class ReusedBytes {
 public:
  // uint8 [bytes], not initialised; overwrites what was given before.
  at::Tensor take(int64_t bytes, c10::Device device);

 private:
  at::Tensor memory_;
};

// Holds what one collective brought, at most one unit's tensors, besides the value that
// next() gave. Every rank makes it from the same tensors and calls next() equally often.
class WholeValues {
 public:
  WholeValues(std::vector<NamedTensor> tensors, const World& world)
      : tensors_(std::move(tensors)), world_(world) {}

  // Of a DTensor: gathered, or where it lies if every rank has all of it. Of a plain
  // tensor: rank 0's. Plain, without gradient; may share memory, and is good until the
  // next call. Collective over the DTensors' mesh, or over the world.
  at::Tensor next();

 private:
  // The tensors [next_, end_), as they came: a row of bytes per rank.
  void bring();
  void move(const at::Tensor& row, int64_t parts);
  bool go_together(const NamedTensor& first, const NamedTensor& other) const;
  at::Tensor unpacked(const at::Tensor& tensor, int64_t offset);
  at::Tensor value_memory(const at::Tensor& like);

  std::vector<NamedTensor> tensors_;
  const World world_;
  size_t next_ = 0, end_ = 0;
  ReusedBytes row_memory_, rows_memory_, value_memory_;
  at::Tensor rows_;  // undefined: of one tensor, which is moved by itself
  int64_t offset_ = 0;
};

}  // namespace fsdp::internal::checkpoint
