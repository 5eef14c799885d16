// What all parameter groups of one rank that shard over one mesh dimension share
// (PyTorch's FSDPCommContext): the transport, who may use it, the stream of reductions,
// the numbers of units, and the counters. Lives as long as a group does. Used by one
// thread at a time.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/transport/accounts.h"
#include "fully_shard/transport/streams.h"
#include "fully_shard/transport/transport.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::internal {

// What the dimensions of a mesh that parameters are sharded over mean. One dimension
// shards; of two, the first replicates and the second shards (hybrid sharding).

inline int64_t shard_mesh_dim(const DeviceMesh& mesh) { return mesh.ndim() - 1; }

// None where nobody has the same shards.
inline std::optional<int64_t> replicate_mesh_dim(const DeviceMesh& mesh) {
  return mesh.ndim() == 2 && mesh.size(0) > 1 ? std::optional<int64_t>(0) : std::nullopt;
}

// What one thread at a time may hold; a thread may hold it several times.
using User = std::atomic<std::thread::id>;

// Group state is driven by one thread at a time: the user's in forward, autograd's in
// backward. Two at once would corrupt it and reorder collectives, so a second thread gets
// an error.
class ExclusiveUse {
 public:
  explicit ExclusiveUse(User& user) : user_(user) {
    auto holder = std::thread::id();
    entered_ = user_.compare_exchange_strong(holder, std::this_thread::get_id(),
                                             std::memory_order_acquire);
    TORCH_CHECK(entered_ || holder == std::this_thread::get_id(),
                "two threads use the sharded parameters of one rank at the same time. Let one "
                "thread at a time run forward "
                "and backward of modules that share a mesh");
  }
  ~ExclusiveUse() {
    if (entered_) user_.store(std::thread::id(), std::memory_order_release);
  }
  ExclusiveUse(const ExclusiveUse&) = delete;

 private:
  User& user_;
  bool entered_;
};

class CommContext {
 public:
  // Of the dimension that shards. Collective over it.
  explicit CommContext(const DeviceMesh& mesh)
      : transport_(mesh, shard_mesh_dim(mesh)), global_rank_(mesh.rank()) {}

  Transport& transport() { return transport_; }
  int64_t shard_rank() const { return transport_.shard_rank(); }
  int64_t shard_count() const { return transport_.shard_count(); }
  // The number of this process, or thread standing for one, in the whole job.
  int64_t global_rank() const { return global_rank_; }
  // Numbers units in the order in which they come, the same on all ranks.
  uint32_t next_unit_number() { return next_unit_number_++; }
  User& user() { return user_; }
  Accounts& accounts() { return accounts_; }
  // What each coordinate owns by the choice of units so far (units/planned_owners.h).
  std::vector<int64_t>& owned_bytes() { return owned_bytes_; }
  // Of the device of the groups, which is one for all.
  ReduceStream& reduce_stream(c10::Device device) {
    if (!reduce_stream_) reduce_stream_.emplace(device);
    TORCH_INTERNAL_ASSERT(reduce_stream_->device() == device);
    return *reduce_stream_;
  }

 private:
  Transport transport_;
  int64_t global_rank_;
  uint32_t next_unit_number_ = 0;
  User user_;
  Accounts accounts_;
  std::vector<int64_t> owned_bytes_;
  std::optional<ReduceStream> reduce_stream_;  // made when it is first asked for
};

}  // namespace fsdp::internal
