// A group's gradients in full size: as autograd leaves them on the members (pending,
// while synchronisation is off or after the group's reduction left), packed into the rows
// of a reduction, and as a reduced part on its way into the registry entry's .grad.
// Local.
#pragma once

#include "fully_shard/params/gradient_buffer.h"
#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/sharded_param.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

class GroupGradients {
 public:
  // All but `accounts` outlive it.
  GroupGradients(ParamGroup& group, std::vector<ShardedParam>& params, GroupAccounts accounts);
  ~GroupGradients();
  GroupGradients(const GroupGradients&) = delete;

  // Takes part in reductions: synchronises, and has something to reduce. The same on
  // every rank.
  bool reduces();
  bool synchronizes() const;
  // Nothing more to wait for before a reduction.
  bool complete();
  // What a backward without synchronisation trains is reduced with the next synchronised
  // one, frozen by then or not.
  void keep_unsynchronized();
  // Some backward's gradients wait for a reduction: unsynchronised ones, or shard sums.
  bool keeps_gradients() const;
  // Parameter `index` has a gradient that stays on its member.
  void note_pending(int64_t index);

  // Makes room for a backward's gradients, if that was not done.
  void open();
  // Packs the gradient that is on the member, if any. A group of one rank adds it to the
  // entry's.
  void pack(int64_t index);
  // Packs all that is pending.
  void collect_pending();
  void drop_pending();
  std::vector<GradientBuffer> take();
  void drop() { take(); }
  bool empty() const { return buffers_.empty(); }

  // Adds this rank's part of parameter `index`'s reduced gradient to its registry entry's
  // .grad, through the hooks that the user put on the entry.
  void publish(int64_t index, const at::Tensor& part);
  double divisor() const;

  // Hybrid sharding: whether reductions go on over the replicas. Where not, what they
  // have summed over the shards is kept here, undivided, for the next one that does.
  bool reduces_over_replicas() const;
  // Keeps this rank's part of parameter `index`, of sum_dtype.
  void keep_shard_sum(int64_t index, const at::Tensor& part);
  // Adds what was kept to `row`, a received row of `buffer`, and keeps it no longer.
  void add_shard_sums(const GradientBuffer& buffer, at::Tensor& row);

 private:
  std::vector<int64_t> reduced_params();
  void forget_shard_sum(int64_t index);
  void check_gradient(const at::Tensor& gradient, int64_t index) const;
  ShardedParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  ParamGroup& group_;
  std::vector<ShardedParam>& params_;
  GroupAccounts accounts_;
  std::vector<bool> unsynchronized_;     // trained without synchronisation since its last reduction
  std::vector<int64_t> pending_bytes_;   // of gradients on members
  std::vector<at::Tensor> shard_sums_;   // by parameter; undefined for none
  std::vector<GradientBuffer> buffers_;  // one per dtype, while a backward fills them
};

}  // namespace fsdp::internal
