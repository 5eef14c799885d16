// This rank's shards of a group's parameters, which its registry entries show, in memory
// of the transport. They lie one behind the other, as the row that it sends when they are
// gathered; or, where ranks share memory, each among the other ranks' shards of the same
// parameter. With HFSDP they are pieces of inner shards (ShardGrid).
// Each part is seen through its registry entry's local tensor. Local.
#pragma once

#include "device_mesh/internal/accelerator.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/policies.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shared_shards.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

// The location of a group's shards between gathers, and with them that of their gradients
// and of what an optimizer keeps of them: with the members, or on the host
// (OffloadPolicy).
enum class ShardLocation { kWithMembers, kHost, kPinnedHost };

// Members on a CPU are at home there.
ShardLocation location_of_shards(const OffloadPolicy& policy, c10::DeviceType members);
// Test mode, process-wide: they are not, and their shards go to host memory beside them.
void set_offloads_from_cpu(bool on);

// Zeros: uint8 [bytes]. device: of the members; on the meta device nothing but a shape.
at::Tensor memory_at(ShardLocation home, int64_t bytes, c10::Device device, Transport& transport);

// In the dtypes of the shards, and of the members; and of what is gathered.
std::vector<ShardExtent> extents_of(const std::vector<FSDPParam>& params);
std::vector<ShardExtent> member_extents_of(const std::vector<FSDPParam>& params);
std::vector<ShardExtent> gathered_extents_of(const std::vector<FSDPParam>& params);

// How other ranks come to these shards: all ranks gather, or, where the transport can,
// each rank reads by itself.
enum class ShardAccess : uint8_t { kGathered, kRead };

class ShardBuffer {
 public:
  struct Options {
    c10::Device device;  // of the members; on the meta device there is nothing but shapes
    ShardLocation home = ShardLocation::kWithMembers;
    ShardAccess access = ShardAccess::kGathered;
    ShardGrid grid = {};
  };
  // Zeros, for parameters as they are.
  ShardBuffer(const std::vector<FSDPParam>& params, CommContext& comm_context, Options options,
              GroupAccounts accounts);
  ~ShardBuffer();
  ShardBuffer(ShardBuffer&& other) noexcept;
  ShardBuffer& operator=(ShardBuffer&& other) noexcept;

  // Zeros for the parameters as they are by now, with members on `device`.
  ShardBuffer remade(const std::vector<FSDPParam>& params, CommContext& comm_context,
                     c10::Device device) const {
    return {params, comm_context, {device, home_, access_, grid_}, accounts_};
  }

  const PackedLayout& layout() const { return layout_; }  // of the places of the grid
  const ShardGrid& grid() const { return grid_; }
  // What they are read by; null: they are gathered.
  SharedShards* shared() const { return shared_.get(); }
  Arrangement arrangement() const { return shared_ ? Arrangement::kCommon : Arrangement::kRow; }
  // uint8, [layout().bytes(arrangement())], of which only this rank's parts are its own.
  const at::Tensor& bytes() const { return bytes_; }
  int64_t held_bytes() const { return has_values() ? layout_.row_bytes() : 0; }
  // As they are sent; a copy where they do not lie so.
  at::Tensor row(Transport& transport) const;
  c10::Device device() const { return bytes_.device(); }  // theirs, not the members'
  // Copies all bytes to `target`, memory of the members' device, on the current stream.
  void copy_to(const at::Tensor& target) const;
  // Before the shards are written: the host waits where they lie there and copies of them
  // are still to be made. After a backward they have been.
  void await_copies() const {
    if (!copied_.has_passed()) copied_.await_on_host();
  }
  // Where members are, and compute: the meta device while there are no values.
  c10::Device member_device() const { return member_device_; }
  bool has_values() const { return !bytes_.is_meta(); }
  bool is_offloaded() const { return home_ != ShardLocation::kWithMembers; }
  bool is_pinned() const { return home_ == ShardLocation::kPinnedHost; }
  char* data(int64_t index) const;
  int64_t length(int64_t index) const { return layout_.chunk(index).length(grid_.place()); }
  // Takes this rank's part from `whole`, the parameter's bytes.
  void take_part(int64_t index, const void* whole) const;
  // Whether it holds this rank's part of `whole`. REQUIRES: host memory.
  bool has_part_of(int64_t index, const void* whole) const;
  // Of this rank's part.
  std::vector<int64_t> shape(int64_t index, const FSDPParam& param) const;
  // Of the inner shard, of which that is a piece; without HFSDP the same.
  std::vector<int64_t> inner_shape(int64_t index, const FSDPParam& param) const;
  // The elements of this rank's part: [n]. A view. The second one of `bytes`, a copy of
  // all of them.
  at::Tensor elements(int64_t index, const FSDPParam& param) const {
    return elements_in(bytes_, index, param);
  }
  at::Tensor elements_in(const at::Tensor& bytes, int64_t index, const FSDPParam& param) const;
  // This rank's part as a tensor. Each has a version counter of its own.
  at::Tensor local_view(int64_t index, const FSDPParam& param) const;

 private:
  int64_t offset(int64_t index) const {
    return layout_.offset(arrangement(), index, grid_.place());
  }

  ShardGrid grid_;
  c10::Device member_device_;
  ShardLocation home_;
  ShardAccess access_;
  PackedLayout layout_;
  std::shared_ptr<SharedShards> shared_;
  at::Tensor bytes_;
  GroupAccounts accounts_;
  mutable DeviceEvent copied_;  // last, from host memory
};

}  // namespace fsdp::internal
