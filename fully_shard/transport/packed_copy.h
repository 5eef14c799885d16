// Moves bytes between whole tensors and the rows of a packed collective buffer. Local. On
// CUDA the copies are ordered on the current stream.
#pragma once

#include "fully_shard/transport/packed_layout.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

void copy_bytes(void* target, const void* source, int64_t bytes, c10::Device device);
void zero_bytes(void* target, int64_t bytes, c10::Device device);

// Rank r's part of `whole` goes to row r at the chunk's offset; the unused tail of a
// short chunk becomes zero.
void copy_to_rows(const void* whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                  int64_t world, c10::Device device);
// The reverse: row r's chunk becomes rank r's part of `whole`.
void copy_from_rows(const char* rows, int64_t row_stride, const PackedChunk& chunk, int64_t world,
                    void* whole, c10::Device device);
// As copy_to_rows, adding elements of `whole` (contiguous, any shape) to what the rows
// hold.
void add_to_rows(const at::Tensor& whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                 int64_t world);

}  // namespace fsdp::internal
