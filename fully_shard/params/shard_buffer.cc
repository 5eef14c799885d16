#include "fully_shard/params/shard_buffer.h"

#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/empty.h>

namespace fsdp::internal {
namespace {

std::vector<ShardExtent> extents_in(at::ScalarType (ShardedParam::*dtype)() const,
                                    const std::vector<ShardedParam>& params) {
  std::vector<ShardExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent((param.*dtype)()));
  return extents;
}

}  // namespace

std::vector<ShardExtent> extents_of(const std::vector<ShardedParam>& params) {
  return extents_in(&ShardedParam::dtype, params);
}

std::vector<ShardExtent> member_extents_of(const std::vector<ShardedParam>& params) {
  return extents_in(&ShardedParam::member_dtype, params);
}

ShardBuffer::ShardBuffer(const std::vector<ShardedParam>& params, ShardDim& dim, c10::Device device,
                         ShardHome home, GroupAccounts accounts)
    : shard_rank_(dim.shard_rank()),
      layout_(extents_of(params), dim.shard_count()),
      bytes_(memory_at(home, layout_.row_bytes(), device, dim.transport())),
      accounts_(std::move(accounts)) {
  accounts_.add(&Counters::sharded_bytes, held_bytes());
}

ShardBuffer::~ShardBuffer() { accounts_.add(&Counters::sharded_bytes, -held_bytes()); }

int64_t ShardBuffer::held_bytes() const { return bytes_.is_meta() ? 0 : bytes_.numel(); }

char* ShardBuffer::data(int64_t index) const {
  return static_cast<char*>(bytes_.data_ptr()) + layout_.chunk(index).offset;
}

void ShardBuffer::take_part(int64_t index, const void* whole) const {
  pack_part(data(index), whole, layout_.chunk(index).part(shard_rank_), device());
}

bool ShardBuffer::has_part_of(int64_t index, const void* whole) const {
  return is_packed_part(data(index), whole, layout_.chunk(index).part(shard_rank_));
}

at::Tensor ShardBuffer::elements(int64_t index, const ShardedParam& param) const {
  return bytes_.narrow(0, layout_.chunk(index).offset, length(index)).view(param.dtype());
}

std::vector<int64_t> ShardBuffer::shape(int64_t index, const ShardedParam& param) const {
  return param.shape_with_rows(layout_.chunk(index).rows(shard_rank_));
}

at::Tensor ShardBuffer::local_view(int64_t index, const ShardedParam& param) const {
  auto local = at::empty({0}, bytes_.options().dtype(param.dtype()));
  const auto offset = layout_.chunk(index).offset + bytes_.storage_offset();
  return local.set_(bytes_.storage(), offset / static_cast<int64_t>(local.element_size()),
                    shape(index, param));
}

}  // namespace fsdp::internal
