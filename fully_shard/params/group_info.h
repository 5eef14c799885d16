// What the parts of a parameter group know in common: its unit, the ranks over which it
// is sharded and replicated (PyTorch's FSDPMeshInfo), what its collectives are issued as,
// and the counters that they go to.
#pragma once

#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/transport.h"
#include "fully_shard/units/unit.h"
#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class FSDPParamGroup;

// The counters that a group updates (fully_shard/counters.h): those of the mesh dimension
// that it shards over, and those of its root.
class GroupAccounts {
 public:
  GroupAccounts(std::shared_ptr<CommContext> comm_context, std::shared_ptr<Unit> unit)
      : comm_context_(std::move(comm_context)), unit_(std::move(unit)) {}

  template <class Number>
  void add(Number Counters::*counter, Number amount) const {
    comm_context_->accounts().add(counter, amount);
    unit_->root()->accounts().add(counter, amount);
  }
  void count(int64_t Counters::*counter) const { add(counter, int64_t{1}); }
  const std::string& unit_name() const { return unit_->display_name(); }

 private:
  std::shared_ptr<CommContext> comm_context_;
  std::shared_ptr<Unit> unit_;
};

// Adds the time of a scope to Counters::wait_seconds. Profilers see it, too.
class WaitClock {
 public:
  explicit WaitClock(const GroupAccounts& accounts)
      : accounts_(accounts), range_("wait", accounts.unit_name()), start_(Clock::now()) {}
  ~WaitClock() {
    accounts_.add(&Counters::wait_seconds,
                  std::chrono::duration<double>(Clock::now() - start_).count());
  }
  WaitClock(const WaitClock&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  const GroupAccounts& accounts_;
  const ProfilerRange range_;
  Clock::time_point start_;
};

// Who runs the groups of one rank on one process group: decides what follows from a touch
// and from a gradient. Implemented by step/runtime.h; a group and its parts only tell it.
// One thread at a time.
class GroupDriver {
 public:
  virtual ~GroupDriver() = default;
  // An operator is about to use the group, which must be unsharded and current when this
  // returns. Collective unless it is.
  virtual void make_current(FSDPParamGroup& group) = 0;
  // `member` is parameter `index` of the group: gradient_arrived() is to be called for
  // it, as long as the group lives.
  virtual void watch_gradient(const at::Tensor& member, FSDPParamGroup& group, int64_t index) = 0;
  // Autograd has left the full gradient of parameter `index` on its member.
  virtual void gradient_arrived(FSDPParamGroup& group, int64_t index) = 0;
  virtual void destroyed(FSDPParamGroup& group) noexcept = 0;
  // The backward of these groups, which may end on another thread than the caller's; null
  // on the CPU, where it does not.
  virtual OpenBackward* open_backward() = 0;
};

class GroupInfo {
 public:
  // `replicas`: to the ranks along the other dimension of the mesh, which have the same
  // shards, or with HFSDP the other pieces of the same inner shard; null where there are
  // none.
  GroupInfo(DeviceMesh mesh, std::shared_ptr<CommContext> comm_context,
            std::shared_ptr<Transport> replicas, std::shared_ptr<Unit> unit,
            std::shared_ptr<GroupDriver> driver);

  const DeviceMesh& mesh() const { return mesh_; }
  CommContext& comm_context() const { return *comm_context_; }
  Transport* replicas() const { return replicas_.get(); }
  // HFSDP: the replicas hold pieces of an inner shard, not the same shards.
  bool has_pieces() const { return replicas_ && unit_->outer == Outer::kShardOptimizer; }
  ShardGrid grid() const;
  Unit& unit() const { return *unit_; }
  GroupDriver& driver() const { return *driver_; }
  const GroupAccounts& accounts() const { return accounts_; }

  const std::string& name() const;
  // Of the unit on its process group, the same on every rank.
  uint32_t number() const { return number_; }
  int64_t rank() const { return comm_context_->global_rank(); }
  // One rank: nothing is ever sent, and members borrow the shards, unless these are of
  // another dtype or on another device.
  bool is_alone() const { return comm_context_->shard_count() == 1 && !replicas_; }
  // Whether the ranks of the mesh tell each other words on the host, as gathers and
  // reductions carry none (host_exchange.h).
  bool exchanges_on_host() const;
  // What a collective of this group is issued as; with the user's own function, if there
  // is one.
  Issue issue(NoticeWords words, const Communicate* custom = nullptr) const;
  // The words that the replicas tell each other here, by replica. Blocks. REQUIRES:
  // replicas(). Collective over them.
  std::vector<uint64_t> words_of_replicas(uint64_t word) const;

 private:
  DeviceMesh mesh_;
  std::shared_ptr<CommContext> comm_context_;
  std::shared_ptr<Transport> replicas_;
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<GroupDriver> driver_;
  uint32_t number_;
  GroupAccounts accounts_;
};

std::vector<uint64_t> agreements_in(const std::vector<NoticeWords>& words);

}  // namespace fsdp::internal
