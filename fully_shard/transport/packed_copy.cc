#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

namespace fsdp::internal {
namespace {

at::Tensor bytes_at(void* data, int64_t bytes, c10::Device device) {
  return at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

// Of a whole parameter: [runs, bytes of a run].
at::Tensor part_at(void* whole, const ShardPart& part, c10::Device device) {
  return view_of_part(bytes_at(whole, part.end(), device), part);
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

at::Tensor view_of_part(const at::Tensor& whole, const ShardPart& part) {
  const auto size = static_cast<int64_t>(whole.element_size());
  return whole.as_strided({part.runs, part.run_bytes / size}, {part.stride / size, 1},
                          whole.storage_offset() + part.first / size);
}

void pack_part(void* packed, const void* whole, const ShardPart& part, c10::Device device) {
  if (part.nbytes() == 0) return;
  if (device.is_cpu()) {
    part.for_each_run([&](int64_t in_whole, int64_t in_part) {
      std::memcpy(static_cast<char*>(packed) + in_part, static_cast<const char*>(whole) + in_whole,
                  static_cast<size_t>(part.run_bytes));
    });
  } else {
    const auto source = part_at(const_cast<void*>(whole), part, device);
    bytes_at(packed, part.nbytes(), device).view(source.sizes()).copy_(source);
  }
}

void unpack_part(void* whole, const void* packed, const ShardPart& part, c10::Device device) {
  if (part.nbytes() == 0) return;
  if (device.is_cpu()) {
    part.for_each_run([&](int64_t in_whole, int64_t in_part) {
      std::memcpy(static_cast<char*>(whole) + in_whole, static_cast<const char*>(packed) + in_part,
                  static_cast<size_t>(part.run_bytes));
    });
  } else {
    const auto target = part_at(whole, part, device);
    const auto source = bytes_at(const_cast<void*>(packed), part.nbytes(), device);
    target.copy_(source.view(target.sizes()));
  }
}

bool is_packed_part(const void* packed, const void* whole, const ShardPart& part) {
  bool same = true;
  if (part.nbytes() == 0) return same;
  part.for_each_run([&](int64_t in_whole, int64_t in_part) {
    same = same && std::memcmp(static_cast<const char*>(packed) + in_part,
                               static_cast<const char*>(whole) + in_whole,
                               static_cast<size_t>(part.run_bytes)) == 0;
  });
  return same;
}

void copy_to_rows(const void* whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                  int64_t world, c10::Device device) {
  for (int64_t rank = 0; rank < world; ++rank) {
    auto* const packed = rows + rank * row_stride + chunk.offset;
    const auto part = chunk.part(rank);
    pack_part(packed, whole, part, device);
    zero_bytes(packed + part.nbytes(), chunk.capacity_bytes() - part.nbytes(), device);
  }
}

void add_to_rows(const at::Tensor& whole, char* rows, int64_t row_stride, const PackedChunk& chunk,
                 int64_t world) {
  const auto flat = whole.reshape({-1});
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto part = chunk.part(rank);
    if (part.nbytes() == 0) continue;
    const auto added = view_of_part(flat, part);
    at::from_blob(rows + rank * row_stride + chunk.offset, added.sizes(), whole.options())
        .add_(added);
  }
}

}  // namespace fsdp::internal
