#include "fully_shard/params/reduce_scatter_input.h"

#include "fully_shard/transport/packed_copy.h"

#include <ATen/Dispatch.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/strides.h>

#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<ShardExtent> extents_of(const std::vector<TrainableParam>& params) {
  std::vector<ShardExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent);
  return extents;
}

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Without a graph or a base. Made by hand, since there are as many as parameters.
at::Tensor view_of(const at::Tensor& row, at::IntArrayRef shape, int64_t offset) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(row.storage()), row.key_set(), row.dtype());
  impl->set_sizes_and_strides(shape, c10::contiguous_strides(shape), offset);
  return at::Tensor(std::move(impl));
}

// Operators would take longer than all else that is done with a few flags.
template <class Scalar>
void write_raised(const std::vector<bool>& raised, void* to) {
  for (size_t i = 0; i < raised.size(); ++i)
    static_cast<Scalar*>(to)[i] = Scalar(raised[i] ? 1 : 0);
}

template <class Scalar>
std::vector<bool> read_raised(const void* from, int64_t count) {
  std::vector<bool> raised;
  const auto* const first = static_cast<const Scalar*>(from);
  for (int64_t i = 0; i < count; ++i) raised.push_back(first[i] != Scalar(0));
  return raised;
}

}  // namespace

ReduceScatterInput::ReduceScatterInput(std::vector<TrainableParam> params, at::ScalarType dtype,
                                       Transport& transport, c10::Device device, Rows rows)
    : params_(std::move(params)),
      shard_count_(transport.shard_count()),
      shard_rank_(transport.shard_rank()),
      reads_flags_(transport.reads_flags()),
      layout_(extents_of(params_), shard_count_),
      dtype_(dtype),
      arrived_(params_.size(), false) {
  if (rows == Rows::kNone) return;
  rows_ = transport.row_memory(row_bytes(), device);
  chunks_ = flag_bytes() == 0 ? rows_ : rows_.narrow(1, flag_bytes(), layout_.row_bytes());
  memory_.ready(DeviceStream::current(device));
}

int64_t ReduceScatterInput::flag_bytes() const { return align_up(flag_count() * bytes_of(dtype_)); }

int64_t ReduceScatterInput::first_element() const { return flag_bytes() / bytes_of(dtype_); }

std::vector<int64_t> ReduceScatterInput::lengths() const {
  auto lengths = layout_.lengths();
  for (auto& length : lengths) length += flag_bytes();
  return lengths;
}

ReduceScatterInput::~ReduceScatterInput() {
  if (rows_.defined()) memory_.free();
}

int64_t ReduceScatterInput::position(int64_t index) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].index == index) return static_cast<int64_t>(i);
  }
  return -1;
}

void ReduceScatterInput::add(int64_t position, const at::Tensor& gradient) {
  memory_.use(DeviceStream::current(rows_.device()));
  const auto& chunk = layout_.chunk(position);
  const RowsToReduce rows{chunks_, dtype_};
  if (arrived_[static_cast<size_t>(position)]) return add_to_rows(gradient, rows, chunk);
  copy_to_rows(gradient, rows, chunk);
  arrived_[static_cast<size_t>(position)] = true;
  ++arrived_count_;
}

void ReduceScatterInput::write_flags(Late late) {
  if (!reads_flags_) return;
  const auto bytes = flag_count() * bytes_of(dtype_);
  auto raised = arrived_;
  raised.push_back(late == Late::kSome);
  auto* const first = static_cast<char*>(rows_.data_ptr());
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(at::kHalf, at::kBFloat16, dtype_, "gradient flags",
                                              [&] { write_raised<scalar_t>(raised, first); });
  for (int64_t row = 1; row < shard_count_; ++row)
    std::memcpy(first + row * rows_.stride(0), first, static_cast<size_t>(bytes));
}

at::Tensor ReduceScatterInput::release_rows(Late late) {
  memory_.free();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (arrived_[i]) continue;
    const auto& chunk = layout_.chunk(static_cast<int64_t>(i));
    if (chunk.is_even()) {
      chunks_.narrow(1, chunk.offset, chunk.capacity_bytes()).zero_();
      continue;
    }
    for (int64_t rank = 0; rank < shard_count_; ++rank)
      chunks_[rank].narrow(0, chunk.offset_on(rank), chunk.room(rank)).zero_();
  }
  chunks_.reset();
  write_flags(late);
  return std::move(rows_);
}

at::Tensor ReduceScatterInput::part(const at::Tensor& row, int64_t position) const {
  return view_of(row, params_[static_cast<size_t>(position)].shard_shape,
                 row.storage_offset() + first_element() +
                     layout_.chunk(position).offset_on(shard_rank_) / bytes_of(dtype_));
}

at::Tensor ReduceScatterInput::elements(const at::Tensor& row) const {
  return row.narrow(0, first_element(), row.numel() - first_element());
}

void ReduceScatterInput::add_part(at::Tensor& row, int64_t position, const at::Tensor& part) {
  this->part(row, position).add_(part);
  arrived_[static_cast<size_t>(position)] = true;
  if (reads_flags_) row.narrow(0, position, 1).add_(1);
}

std::vector<bool> ReduceScatterInput::read_flags(const at::Tensor& row) const {
  std::vector<bool> raised;
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(
      at::kHalf, at::kBFloat16, row.scalar_type(), "gradient flags",
      [&] { raised = read_raised<scalar_t>(row.const_data_ptr<scalar_t>(), flag_count()); });
  return raised;
}

std::vector<bool> ReduceScatterInput::used(const at::Tensor& row) const {
  if (!used_.empty()) return used_;
  if (!reads_flags_) return std::vector<bool>(params_.size(), true);
  auto used = read_flags(row);
  used.pop_back();  // of late gradients
  return used;
}

bool ReduceScatterInput::late(const at::Tensor& row) const {
  return reads_flags_ && read_flags(row).back();
}

}  // namespace fsdp::internal
