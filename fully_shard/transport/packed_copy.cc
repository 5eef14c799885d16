#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/split_with_sizes_copy.h>

#include <cstring>
#include <vector>

namespace fsdp::internal {
namespace {

at::Tensor bytes_at(void* data, int64_t bytes, c10::Device device) {
  return at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

// Of a whole parameter: [runs, bytes of a run].
at::Tensor part_at(void* whole, const ShardPart& part, c10::Device device) {
  return view_of_part(bytes_at(whole, part.end(), device), part);
}

bool is_one_run(const PackedChunk& chunk) { return chunk.part(0).runs == 1; }

// The parts of some ranks that follow one another and have as many elements, in the rows
// and in the whole parameter: two views [ranks, runs, elements of a run].
struct PartsOfRanks {
  at::Tensor in_rows, in_whole;
};

// `rows`: [ranks, elements]; `whole`: contiguous, of any dtype; `chunk`: of the rows'
// dtype.
PartsOfRanks parts_of(const at::Tensor& rows, const at::Tensor& whole, const PackedChunk& chunk,
                      int64_t first_rank, int64_t count) {
  const auto size = static_cast<int64_t>(rows.element_size());
  const auto elements = chunk.extent.row_bytes / size;
  const auto run = chunk.rows(first_rank) * elements;
  const std::vector<int64_t> shape = {count, chunk.extent.blocks, run};
  const auto stride = rows.stride(0);
  return {rows.as_strided(
              shape, {stride, run, 1},
              rows.storage_offset() + first_rank * stride + chunk.offset_on(first_rank) / size),
          whole.as_strided(shape, {chunk.capacity_rows * elements, chunk.extent.rows * elements, 1},
                           whole.storage_offset() + chunk.first_row(first_rank) * elements)};
}

// visit(PartsOfRanks): of all ranks with full parts at once, then of the one with a
// smaller part, if there is one; of a ragged layout rank by rank.
template <class Visit>
void for_each_size_of_part(const at::Tensor& rows, const at::Tensor& whole,
                           const PackedChunk& chunk, const Visit& visit) {
  if (chunk.extent.nbytes() == 0) return;
  for (int64_t rank = 0; !chunk.is_even() && rank < rows.size(0); ++rank)
    if (chunk.length(rank) > 0) visit(parts_of(rows, whole, chunk, rank, 1));
  if (!chunk.is_even()) return;
  const auto full = chunk.extent.rows / chunk.capacity_rows;
  visit(parts_of(rows, whole, chunk, 0, full));
  if (chunk.extent.rows % chunk.capacity_rows != 0) visit(parts_of(rows, whole, chunk, full, 1));
}

at::Tensor dense(const at::Tensor& tensor) {
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();  // its bytes are not its values
  return (is_lazy ? tensor.resolve_conj().resolve_neg() : tensor).contiguous();
}

// The rows of a gather as one tensor [ranks, bytes], where they are as far from one
// another; otherwise undefined.
at::Tensor as_one_tensor(const RowsOfRanks& from, c10::Device device) {
  const auto bytes = from.layout.row_bytes();
  auto* const first = const_cast<char*>(from.rows.row(0));
  const auto stride = from.ranks == 1 ? bytes : from.rows.row(1) - from.rows.row(0);
  for (int64_t rank = 1; rank < from.ranks; ++rank) {
    if (from.rows.row(rank) - first != rank * stride) return {};
  }
  return at::from_blob(first, {from.ranks, bytes}, {stride, 1},
                       at::TensorOptions().dtype(at::kByte).device(device));
}

// A chunk of every row, and what is behind it in the rows, go into the parameter's room.
void split_into_rooms(const at::Tensor& rows, const RowsOfRanks& from, const RoomOfParameters& to) {
  std::vector<at::Tensor> targets;
  std::vector<int64_t> sizes;
  const auto take = [&](int64_t offset, int64_t bytes) {
    if (bytes == 0) return;
    sizes.push_back(bytes);
    targets.push_back(to.bytes.narrow(0, offset, from.ranks * bytes).view({from.ranks, bytes}));
  };
  for (int64_t index = 0; index < from.layout.size(); ++index) {
    const auto bytes = from.layout.chunk(index).capacity_bytes();
    take(to.offset(index), bytes);
    take(to.offset(index) + from.ranks * bytes, align_up(bytes) - bytes);
  }
  if (!targets.empty()) at::split_with_sizes_copy_out(targets, rows, sizes, /*dim=*/1);
}

// Parts that are several runs.
void merge_runs(const at::Tensor& rows, const RowsOfRanks& from, const RoomOfParameters& to) {
  for (int64_t index = 0; index < from.layout.size(); ++index) {
    const auto& chunk = from.layout.chunk(index);
    if (is_one_run(chunk)) continue;
    const auto whole = to.bytes.narrow(0, to.offset(index), chunk.extent.nbytes());
    for_each_size_of_part(rows, whole, chunk,
                          [](const PartsOfRanks& parts) { parts.in_whole.copy_(parts.in_rows); });
  }
}

void unpack_each(const RowsOfRanks& from, const RoomOfParameters& to) {
  auto* const first = static_cast<char*>(to.bytes.data_ptr());
  for (int64_t index = 0; index < from.layout.size(); ++index) {
    const auto& chunk = from.layout.chunk(index);
    for (int64_t rank = 0; rank < from.ranks; ++rank) {
      unpack_part(first + to.offset(index),
                  from.rows.row(rank) + from.layout.offset(from.arrangement, index, rank),
                  chunk.part(rank), to.bytes.device());
    }
  }
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

void unpack_rows(const RowsOfRanks& from, const RoomOfParameters& to) {
  const auto rows = to.bytes.is_cpu() ? at::Tensor() : as_one_tensor(from, to.bytes.device());
  const bool is_even = from.layout.is_even() && to.layout.is_even();
  if (!rows.defined() || !is_even) return unpack_each(from, to);
  split_into_rooms(rows, from, to);
  merge_runs(rows, from, to);
}

void copy_to_rows(const at::Tensor& whole, const RowsToReduce& rows, const PackedChunk& chunk) {
  if (rows.bytes.numel() == 0) return;  // no view of another dtype is possible
  if (!rows.bytes.is_cpu()) {
    for_each_size_of_part(rows.bytes.view(rows.dtype), dense(whole), chunk,
                          [](const PartsOfRanks& parts) { parts.in_rows.copy_(parts.in_whole); });
    return;
  }
  const auto elements = dense(in_dtype(whole, rows.dtype));
  auto* const first = static_cast<char*>(rows.bytes.data_ptr());
  for (int64_t rank = 0; rank < rows.bytes.size(0); ++rank) {
    auto* const packed = first + rank * rows.bytes.stride(0) + chunk.offset_on(rank);
    const auto part = chunk.part(rank);
    pack_part(packed, elements.const_data_ptr(), part, c10::kCPU);
    zero_bytes(packed + part.nbytes(), chunk.room(rank) - part.nbytes(), c10::kCPU);
  }
}

// Rounded to the rows' dtype before it is added, on every device.
void add_to_rows(const at::Tensor& whole, const RowsToReduce& rows, const PackedChunk& chunk) {
  if (rows.bytes.numel() == 0) return;
  for_each_size_of_part(rows.bytes.view(rows.dtype), dense(in_dtype(whole, rows.dtype)), chunk,
                        [](const PartsOfRanks& parts) { parts.in_rows.add_(parts.in_whole); });
}

}  // namespace fsdp::internal
