// Moves bytes between whole tensors and the rows of a packed collective buffer. Local. On
// CUDA the copies are ordered on the current stream, one for each part.
#pragma once

#include "fully_shard/transport/packed_layout.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

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

// Rank r's part of `whole` goes to row r at the chunk's offset; the unused tail of a
// smaller part becomes zero.
void copy_to_rows(const void* whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                  int64_t world, c10::Device device);
// As copy_to_rows, adding elements of `whole` (contiguous, any shape) to what the rows
// hold.
void add_to_rows(const at::Tensor& whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                 int64_t world);

}  // namespace fsdp::internal
