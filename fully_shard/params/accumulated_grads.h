// The gradients of a group in full size: accumulated, while synchronisation is off or
// after the group's reduction left (unsharded_grads.h), packed into the rows of a
// reduction, and as a reduced part on its way into the registry entry's .grad. Local.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/gradient_buffer.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/unsharded_grads.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {

class AccumulatedGrads {
 public:
  // All but `writes` outlive it; `writes`: of the group, for tripwires.
  AccumulatedGrads(const GroupInfo& info, std::vector<FSDPParam>& params, const ShardBuffer& shards,
                   std::weak_ptr<ShardWrites> writes);
  ~AccumulatedGrads();
  AccumulatedGrads(const AccumulatedGrads&) = delete;

  // Gradients are added up, over backwards and over the ranks, in `dtype` instead of the
  // members' own; complex ones stay what they are.
  void set_reduce_dtype(std::optional<at::ScalarType> dtype) { reduce_dtype_ = dtype; }
  // Called with the sum over all ranks, [elements] of sum_dtype, before it is divided,
  // once per reduction and in the same order on all ranks; what it writes is published.
  using Hook = std::function<void(const at::Tensor& sum)>;
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  // `row`: a received row of `buffer`.
  void run_hook(const GradientBuffer& buffer, const at::Tensor& row) const;

  // Takes part in reductions: synchronises, and has something to reduce. The same on
  // every rank.
  bool reduces();
  bool synchronizes() const;
  // One rank, where no hook wants rows: gradients go to the entries at once.
  bool stays_here() const;
  // Nothing more to wait for before a reduction.
  bool complete();
  // What a backward without synchronisation trains is reduced with the next synchronised
  // one, frozen by then or not.
  void keep_unsynchronized();
  // Some backward's gradients wait for a reduction: unsynchronised ones, or shard sums.
  bool keeps_gradients() const;
  // Autograd delivered the gradient of parameter `index`. One that came as a replicated
  // DTensor becomes plain; one in parts or terms throws ValueError, since they may have
  // been added to gradients of this rank alone (on_demand/replicated_members.h).
  void receive(int64_t index);
  // Parameter `index` has a gradient that waits for a later reduction.
  void accumulate(int64_t index) { accumulated_.keep(index, reduce_dtype(index)); }
  bool has_accumulated(int64_t index) const { return accumulated_.waits(index); }
  // What taken gradients left on the members (optimizer_tripwire.h).
  bool has_left_tripwires() const { return accumulated_.has_left_tripwires(); }
  void remove_tripwires() { accumulated_.remove_tripwires(); }

  // Makes room for a backward's gradients, if that was not done.
  void open();
  // Packs the gradient of parameter `index` and what was accumulated, if any. Where it
  // stays here it is published. That of a tensor-parallel member is brought to where this
  // lies, which is collective over its mesh if data moves; terms of one that lies whole
  // are packed by pack_accumulated(), all at once.
  void pack(int64_t index);
  // Packs all that is accumulated. Collective over the meshes of tensor-parallel members
  // whose gradients are terms.
  void pack_accumulated();
  void drop_accumulated();
  std::vector<GradientBuffer> take();
  void drop() {
    drop_terms();
    take();
  }
  bool empty() const { return buffers_.empty(); }

  // Adds this rank's part of parameter `index`'s reduced gradient to its registry entry's
  // .grad, through the hooks that the user put on the entry.
  void publish(int64_t index, const at::Tensor& part);
  double divisor() const;
  // Parameters that no rank used get zeros, not nothing.
  bool publishes_unused() const;

  // Hybrid sharding: whether reductions go on over the replicas. Where not, what they
  // have summed over the shards is kept here, undivided, for the next one that does.
  bool reduces_over_replicas() const;
  // Keeps this rank's part of parameter `index`, of sum_dtype.
  void keep_shard_sum(int64_t index, const at::Tensor& part);
  // Adds what was kept to `row`, a received row of `buffer`, and keeps it no longer.
  void add_shard_sums(const GradientBuffer& buffer, at::Tensor& row);

 private:
  // The terms of a replicated tensor-parallel member wait for those of the others.
  struct Terms {
    int64_t index;
    at::Tensor gradient;  // a DTensor, of the reduce dtype
  };

  void pack_whole(int64_t index, const at::Tensor& gradient);
  void keep_terms(int64_t index, const at::Tensor& gradient);
  void pack_terms();
  void drop_terms();
  bool has_terms(int64_t index) const;
  bool is_reduced(size_t index);
  bool reduces_any();
  std::vector<int64_t> reduced_params();
  void forget_shard_sum(int64_t index);
  at::ScalarType reduce_dtype(int64_t index) const;
  void publish_here(int64_t index, const at::Tensor& gradient);
  void publish_zeros_here();
  FSDPParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  std::vector<bool> unsynchronized_;  // trained without synchronisation since its last reduction
  UnshardedGrads accumulated_;
  std::vector<at::Tensor> shard_sums_;   // by parameter; undefined for none
  bool has_replicated_members_;          // tensor-parallel ones
  std::vector<Terms> terms_;             // of a running backward
  std::vector<GradientBuffer> buffers_;  // one per dtype, while a backward fills them
  std::optional<at::ScalarType> reduce_dtype_ = {};
  Hook hook_ = {};
};

}  // namespace fsdp::internal
