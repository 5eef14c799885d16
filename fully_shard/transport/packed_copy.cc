#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

namespace fsdp::internal {
namespace {

at::Tensor bytes_at(void* data, int64_t bytes, c10::Device device) {
  return at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

void copy_bytes(void* target, const void* source, int64_t bytes, c10::Device device) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
  } else {
    bytes_at(target, bytes, device).copy_(bytes_at(const_cast<void*>(source), bytes, device));
  }
}

void zero_bytes(void* target, int64_t bytes, c10::Device device) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memset(target, 0, static_cast<size_t>(bytes));
  } else {
    bytes_at(target, bytes, device).zero_();
  }
}

void copy_to_rows(const void* whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                  int64_t world, c10::Device device) {
  for (int64_t rank = 0; rank < world; ++rank) {
    auto* row = rows + rank * row_stride + chunk.offset;
    const int64_t length = chunk.length(rank);
    copy_bytes(row, static_cast<const char*>(whole) + chunk.first(rank), length, device);
    zero_bytes(row + length, chunk.capacity_bytes - length, device);
  }
}

void copy_from_rows(const char* rows, int64_t row_stride, const PackedChunk& chunk, int64_t world,
                    void* whole, c10::Device device) {
  for (int64_t rank = 0; rank < world; ++rank) {
    copy_bytes(static_cast<char*>(whole) + chunk.first(rank),
               rows + rank * row_stride + chunk.offset, chunk.length(rank), device);
  }
}

void add_to_rows(const at::Tensor& whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                 int64_t world) {
  const auto flat = whole.reshape({-1});
  const auto itemsize = static_cast<int64_t>(whole.element_size());
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t length = chunk.length(rank) / itemsize;
    if (length == 0) continue;
    at::from_blob(rows + rank * row_stride + chunk.offset, {length}, whole.options())
        .add_(flat.narrow(0, chunk.first(rank) / itemsize, length));
  }
}

}  // namespace fsdp::internal
