#include "fully_shard/params/shard_buffer.h"

#include "fully_shard/params/rank_agreement.h"
#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <utility>

namespace fsdp::internal {
namespace {

std::atomic<bool> offloads_from_cpu = false;

std::vector<ShardExtent> extents(ShardExtent (ParamMeta::*extent)() const,
                                 const std::vector<FSDPParam>& params) {
  std::vector<ShardExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back((param.meta().*extent)());
  return extents;
}

// What is gathered as codes, in another dtype or on another device is not the shards as
// they lie.
bool can_be_read(const ShardBuffer::Options& options, const std::vector<FSDPParam>& params) {
  return options.access == ShardAccess::kRead && options.home == ShardLocation::kWithMembers &&
         options.device.is_cpu() && !any(params, &ParamMeta::is_staged);
}

ShardsToShare to_share(const PackedLayout& layout, int64_t rank) {
  ShardsToShare shards{.bytes = layout.bytes(Arrangement::kCommon),
                       .table = AgreedValues::table_size(static_cast<size_t>(layout.size()))};
  for (int64_t i = 0; i < layout.size(); ++i)
    shards.own.push_back(
        {layout.offset(Arrangement::kCommon, i, rank), layout.chunk(i).length(rank)});
  return shards;
}

}  // namespace

ShardLocation location_of_shards(const OffloadPolicy& policy, c10::DeviceType members) {
  if (!policy.offload_to_cpu) return ShardLocation::kWithMembers;
  if (members == c10::kCPU)
    return offloads_from_cpu ? ShardLocation::kHost : ShardLocation::kWithMembers;
  return policy.pin_memory ? ShardLocation::kPinnedHost : ShardLocation::kHost;
}

void set_offloads_from_cpu(bool on) { offloads_from_cpu = on; }

at::Tensor memory_at(ShardLocation home, int64_t bytes, c10::Device device, Transport& transport) {
  if (home == ShardLocation::kWithMembers || device.is_meta())
    return transport.shard_memory(bytes, device);
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
  return at::zeros({bytes}, options.pinned_memory(home == ShardLocation::kPinnedHost));
}

std::vector<ShardExtent> extents_of(const std::vector<FSDPParam>& params) {
  return extents(&ParamMeta::own_extent, params);
}

std::vector<ShardExtent> member_extents_of(const std::vector<FSDPParam>& params) {
  return extents(&ParamMeta::member_extent, params);
}

std::vector<ShardExtent> gathered_extents_of(const std::vector<FSDPParam>& params) {
  return extents(&ParamMeta::gathered_extent, params);
}

ShardBuffer::ShardBuffer(const std::vector<FSDPParam>& params, CommContext& comm_context,
                         Options options, GroupAccounts accounts)
    : grid_(options.grid),
      member_device_(options.device),
      home_(options.home),
      access_(options.access),
      layout_(cut_over(extents_of(params), grid_), grid_.count()),
      shared_(can_be_read(options, params)
                  ? comm_context.transport().share_shards(to_share(layout_, grid_.place()))
                  : nullptr),
      bytes_(shared_
                 ? shared_->bytes()
                 : memory_at(home_, layout_.row_bytes(), options.device, comm_context.transport())),
      accounts_(std::move(accounts)) {
  accounts_.add(&Counters::sharded_bytes, held_bytes());
}

ShardBuffer::~ShardBuffer() {
  await_copies();
  if (bytes_.defined()) accounts_.add(&Counters::sharded_bytes, -held_bytes());
}

ShardBuffer::ShardBuffer(ShardBuffer&& other) noexcept = default;

// What was here goes with `other`.
ShardBuffer& ShardBuffer::operator=(ShardBuffer&& other) noexcept {
  std::swap(grid_, other.grid_);
  std::swap(member_device_, other.member_device_);
  std::swap(home_, other.home_);
  std::swap(access_, other.access_);
  std::swap(layout_, other.layout_);
  std::swap(shared_, other.shared_);
  std::swap(bytes_, other.bytes_);
  std::swap(accounts_, other.accounts_);
  std::swap(copied_, other.copied_);
  return *this;
}

at::Tensor ShardBuffer::row(Transport& transport) const {
  if (arrangement() == Arrangement::kRow) return bytes_;
  auto row = transport.staging_memory(layout_.row_bytes(), device());
  auto* const first = static_cast<char*>(row.mutable_data_ptr());
  for (int64_t i = 0; i < layout_.size(); ++i)
    copy_bytes(first + layout_.chunk(i).offset_on(grid_.place()), data(i), length(i), device());
  return row;
}

void ShardBuffer::copy_to(const at::Tensor& target) const {
  target.copy_(bytes_, /*non_blocking=*/true);
  if (is_offloaded()) copied_.record(DeviceStream::current(target.device()));
}

char* ShardBuffer::data(int64_t index) const {
  return static_cast<char*>(bytes_.data_ptr()) + offset(index);
}

void ShardBuffer::take_part(int64_t index, const void* whole) const {
  pack_part(data(index), whole, layout_.chunk(index).part(grid_.place()), device());
}

bool ShardBuffer::has_part_of(int64_t index, const void* whole) const {
  return is_packed_part(data(index), whole, layout_.chunk(index).part(grid_.place()));
}

at::Tensor ShardBuffer::elements_in(const at::Tensor& bytes, int64_t index,
                                    const FSDPParam& param) const {
  return bytes.narrow(0, offset(index), length(index)).view(param.meta().dtype());
}

std::vector<int64_t> ShardBuffer::shape(int64_t index, const FSDPParam& param) const {
  return param.meta().shape_with_rows(layout_.chunk(index).rows(grid_.place()));
}

std::vector<int64_t> ShardBuffer::inner_shape(int64_t index, const FSDPParam& param) const {
  const auto& chunk = layout_.chunk(index);
  const auto first = grid_.place_of(grid_.inner_rank, 0);
  return param.meta().shape_with_rows(chunk.first_row(first + grid_.outer_ranks) -
                                      chunk.first_row(first));
}

at::Tensor ShardBuffer::local_view(int64_t index, const FSDPParam& param) const {
  auto local = at::empty({0}, bytes_.options().dtype(param.meta().dtype()));
  const auto first = offset(index) + bytes_.storage_offset();
  return local.set_(bytes_.storage(), first / static_cast<int64_t>(local.element_size()),
                    shape(index, param));
}

}  // namespace fsdp::internal
