#include "fully_shard/params/shard_buffer.h"

#include "dtensor/internal/shard_layout.h"
#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/empty.h>

namespace fsdp::internal {
namespace {

std::vector<DimZeroExtent> extents_in(at::ScalarType (ShardedParam::*dtype)() const,
                                      const std::vector<ShardedParam>& params) {
  std::vector<DimZeroExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent((param.*dtype)()));
  return extents;
}

}  // namespace

std::vector<DimZeroExtent> extents_of(const std::vector<ShardedParam>& params) {
  return extents_in(&ShardedParam::dtype, params);
}

std::vector<DimZeroExtent> member_extents_of(const std::vector<ShardedParam>& params) {
  return extents_in(&ShardedParam::member_dtype, params);
}

ShardBuffer::ShardBuffer(const std::vector<ShardedParam>& params, ShardDim& dim, c10::Device device,
                         GroupAccounts accounts)
    : shard_rank_(dim.shard_rank()),
      shard_count_(dim.shard_count()),
      layout_(extents_of(params), shard_count_),
      bytes_(dim.transport().shard_memory(layout_.row_bytes(), device)),
      accounts_(std::move(accounts)) {
  accounts_.add(&Counters::sharded_bytes, held_bytes());
}

ShardBuffer::~ShardBuffer() { accounts_.add(&Counters::sharded_bytes, -held_bytes()); }

int64_t ShardBuffer::held_bytes() const { return bytes_.is_meta() ? 0 : bytes_.numel(); }

char* ShardBuffer::data(int64_t index) const {
  return static_cast<char*>(bytes_.data_ptr()) + layout_.chunk(index).offset;
}

void ShardBuffer::take_part(int64_t index, const void* whole) const {
  copy_bytes(data(index), static_cast<const char*>(whole) + first(index), length(index), device());
}

at::Tensor ShardBuffer::elements(int64_t index, const ShardedParam& param) const {
  return bytes_.narrow(0, layout_.chunk(index).offset, length(index)).view(param.dtype());
}

at::Tensor ShardBuffer::local_view(int64_t index, const ShardedParam& param) const {
  auto sizes = param.spec()->shape;
  sizes.front() = chunk_of(param.rows(), shard_count_, shard_rank_).length;
  auto local = at::empty({0}, bytes_.options().dtype(param.dtype()));
  const auto offset = layout_.chunk(index).offset + bytes_.storage_offset();
  return local.set_(bytes_.storage(), offset / static_cast<int64_t>(local.element_size()), sizes);
}

}  // namespace fsdp::internal
