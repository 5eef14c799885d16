#include "fully_shard/params/gradient_buffer.h"

#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<DimZeroExtent> extents_of(const std::vector<TrainableParam>& params) {
  std::vector<DimZeroExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent);
  return extents;
}

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

}  // namespace

GradientBuffer::GradientBuffer(std::vector<TrainableParam> params, at::ScalarType dtype,
                               Transport& transport, c10::Device device)
    : params_(std::move(params)),
      shard_rank_(transport.shard_rank()),
      shard_count_(transport.shard_count()),
      reads_flags_(transport.reads_flags()),
      layout_(extents_of(params_), shard_count_),
      dtype_(dtype),
      rows_(transport.row_memory(layout_.row_bytes() + align_up(flag_count() * bytes_of(dtype)),
                                 device)),
      arrived_(params_.size(), false) {}

int64_t GradientBuffer::position(int64_t index) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].index == index) return static_cast<int64_t>(i);
  }
  return -1;
}

void GradientBuffer::add(int64_t position, const at::Tensor& gradient) {
  const auto& chunk = layout_.chunk(position);
  const auto dense = gradient.contiguous();
  const auto stride = rows_.stride(0);
  if (arrived_[static_cast<size_t>(position)]) {
    add_to_rows(dense, row_data(), stride, chunk, shard_count_);
    return;
  }
  copy_to_rows(dense.const_data_ptr(), row_data(), stride, chunk, shard_count_, rows_.device());
  arrived_[static_cast<size_t>(position)] = true;
  ++arrived_count_;
}

void GradientBuffer::write_flags(Late late) {
  const auto bytes = flag_count() * bytes_of(dtype_);
  if (!reads_flags_) {  // nobody looks, and writing them would make the host wait
    rows_.narrow(1, layout_.row_bytes(), bytes).zero_();
    return;
  }
  std::vector<double> raised(arrived_.begin(), arrived_.end());
  raised.push_back(late == Late::kSome ? 1 : 0);
  const auto values = at::tensor(raised, at::TensorOptions().dtype(at::kDouble)).to(dtype_);
  for (int64_t row = 0; row < shard_count_; ++row) {
    std::memcpy(row_data() + row * rows_.stride(0) + layout_.row_bytes(), values.const_data_ptr(),
                static_cast<size_t>(bytes));
  }
}

at::Tensor GradientBuffer::release_rows(Late late) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (arrived_[i]) continue;
    const auto& chunk = layout_.chunk(static_cast<int64_t>(i));
    rows_.narrow(1, chunk.offset, chunk.capacity_bytes).zero_();
  }
  write_flags(late);
  return std::move(rows_);
}

at::Tensor GradientBuffer::part(const at::Tensor& row, int64_t position) const {
  const auto& chunk = layout_.chunk(position);
  const auto size = bytes_of(dtype_);
  // One operator, where narrow() is three.
  return row.as_strided({chunk.length(shard_rank_) / size}, {1},
                        row.storage_offset() + chunk.offset / size);
}

void GradientBuffer::add_part(at::Tensor& row, int64_t position, const at::Tensor& part) const {
  this->part(row, position).add_(part);
  if (reads_flags_) row.narrow(0, layout_.row_bytes() / bytes_of(dtype_) + position, 1).add_(1);
}

std::vector<double> GradientBuffer::read_flags(const at::Tensor& row) const {
  auto flags = row.narrow(0, layout_.row_bytes() / bytes_of(dtype_), flag_count());
  if (flags.is_complex()) flags = at::real(flags);
  flags = flags.to(at::kDouble).contiguous();
  const auto* values = flags.const_data_ptr<double>();
  return {values, values + flag_count()};
}

std::vector<bool> GradientBuffer::used(const at::Tensor& row) const {
  std::vector<bool> used(params_.size(), true);
  if (!reads_flags_) return used;
  const auto flags = read_flags(row);
  for (size_t i = 0; i < used.size(); ++i) used[i] = flags[i] > 0;
  return used;
}

bool GradientBuffer::late(const at::Tensor& row) const {
  return reads_flags_ && read_flags(row).back() > 0;
}

}  // namespace fsdp::internal
