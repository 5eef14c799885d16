// Moves bytes between whole tensors and the rows of a packed collective buffer. Local.
//
// On the CPU each run is a memcpy, which nothing beats there. On a device every copy is a
// launch, which costs the host more than most copies cost the device: there all ranks'
// parts go at once, ordered on the current stream.
#pragma once

#include "device_mesh/collectives/operations.h"
#include "fully_shard/transport/packed_layout.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// As tensor.to(dtype).
inline at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

void copy_bytes(void* target, const void* source, int64_t bytes, c10::Device device);
void zero_bytes(void* target, int64_t bytes, c10::Device device);

// Takes `part` out of a parameter at `whole`.
void pack_part(void* packed, const void* whole, const ShardPart& part, c10::Device device);
// The reverse.
void unpack_part(void* whole, const void* packed, const ShardPart& part, c10::Device device);
// Whether `packed` has the bytes of the part. REQUIRES: host memory.
bool is_packed_part(const void* packed, const void* whole, const ShardPart& part);
// The elements of `part` in `whole`, a parameter's elements [n]: [runs, elements of a
// run]. A view.
at::Tensor view_of_part(const at::Tensor& whole, const ShardPart& part);

// The rows of a gather, all of one layout. On a device they are arranged as rows.
struct RowsOfRanks {
  const GatheredRows& rows;
  const PackedLayout& layout;
  int64_t ranks;
  Arrangement arrangement = Arrangement::kRow;
};

// Memory of whole parameters, as `layout` has them in memory of all ranks.
struct RoomOfParameters {
  const at::Tensor& bytes;  // uint8
  const PackedLayout& layout;

  int64_t offset(int64_t index) const { return layout.chunk(index).whole_offset; }
};

// Every parameter of the rows becomes whole; what is left of its room may be written,
// too. On a device one launch does it for all that are cut along dimension 0, and one or
// two more for each that is not; where a cut is ragged, one for each part. REQUIRES: the
// rows are of the same parameters, over as many ranks or a divisor of that.
void unpack_rows(const RowsOfRanks& from, const RoomOfParameters& to);

// Rows of a reduction: uint8, [ranks, bytes], that hold elements of `dtype`.
struct RowsToReduce {
  const at::Tensor& bytes;
  at::ScalarType dtype;
};

// Rank r's part of `whole`, of any dtype and shape, is cast and goes to row r at the
// chunk's offset. The unused tail of a smaller part becomes zero on the CPU, and stays as
// it is on a device, where this is one launch, and a second one if the parts differ in
// size; of a ragged layout one for each part.
void copy_to_rows(const at::Tensor& whole, const RowsToReduce& rows, const PackedChunk& chunk);
// The same, adding to what the rows hold.
void add_to_rows(const at::Tensor& whole, const RowsToReduce& rows, const PackedChunk& chunk);

}  // namespace fsdp::internal
