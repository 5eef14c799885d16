#include "fully_shard/step/gradient_buffer.h"

#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/transport/transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/tensor.h>

#include <utility>

namespace fsdp::internal {
namespace {

std::vector<DimZeroExtent> extents_of(const std::vector<TrainableParam>& params) {
  std::vector<DimZeroExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent);
  return extents;
}

}  // namespace

GradientBuffer::GradientBuffer(std::vector<TrainableParam> params, at::ScalarType dtype,
                               int64_t world, c10::Device device)
    : params_(std::move(params)),
      layout_(extents_of(params_), world),
      dtype_(dtype),
      world_(world),
      arrived_(params_.size(), false) {
  const auto flag_bytes = align_up(flag_count() * static_cast<int64_t>(c10::elementSize(dtype)));
  rows_ = at::empty({world, layout_.row_bytes() + flag_bytes + kStampRoom},
                    at::TensorOptions().dtype(at::kByte).device(device));
}

int64_t GradientBuffer::position(int64_t index) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].index == index) return static_cast<int64_t>(i);
  }
  return -1;
}

void GradientBuffer::add(int64_t position, const at::Tensor& gradient) {
  const auto& chunk = layout_.chunk(position);
  const auto dense = gradient.contiguous();
  if (arrived_[static_cast<size_t>(position)]) {
    add_to_rows(dense, row_data(), rows_.size(1), chunk, world_);
    return;
  }
  copy_to_rows(dense.const_data_ptr(), row_data(), rows_.size(1), chunk, world_, rows_.device());
  arrived_[static_cast<size_t>(position)] = true;
  ++arrived_count_;
}

void GradientBuffer::write_flags(Late late) {
  std::vector<double> flags(arrived_.begin(), arrived_.end());
  flags.push_back(late == Late::kSome ? 1 : 0);
  const auto values = at::tensor(flags, at::TensorOptions().dtype(at::kDouble))
                          .to(rows_.device(), dtype_)
                          .view(at::kByte);
  rows_.narrow(1, layout_.row_bytes(), values.numel()).copy_(values.unsqueeze(0));
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

at::Tensor GradientBuffer::part(const at::Tensor& row, int64_t position, int64_t rank) const {
  const auto& chunk = layout_.chunk(position);
  return row.narrow(0, chunk.offset, chunk.length(rank)).view(dtype_);
}

std::vector<double> GradientBuffer::read_flags(const at::Tensor& row) const {
  const auto bytes = flag_count() * static_cast<int64_t>(c10::elementSize(dtype_));
  auto flags = row.narrow(0, layout_.row_bytes(), bytes).view(dtype_);
  if (flags.is_complex()) flags = at::real(flags);
  flags = flags.to(at::kDouble).contiguous();
  const auto* values = flags.const_data_ptr<double>();
  return {values, values + flag_count()};
}

std::vector<bool> GradientBuffer::used(const at::Tensor& row) const {
  // On CUDA reading the flags would stall the host: there every parameter of a reduced
  // group counts as used.
  std::vector<bool> used(params_.size(), true);
  if (!row.is_cpu()) return used;
  const auto flags = read_flags(row);
  for (size_t i = 0; i < used.size(); ++i) used[i] = flags[i] > 0;
  return used;
}

bool GradientBuffer::late(const at::Tensor& row) const {
  return row.is_cpu() && read_flags(row).back() > 0;
}

}  // namespace fsdp::internal
