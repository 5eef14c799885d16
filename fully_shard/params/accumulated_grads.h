// The gradients of a group on their way from autograd to the `.grad` of the registry
// entries: what has arrived, what waits, and what goes into the next reduction. Each part
// of the way has a file:
//
//   unsharded_grads.h        full gradients that wait for a later reduction
//   tensor_parallel_terms.h  gradients of replicated tensor-parallel members, to be summed at once
//   reduce_scatter_input.h   full gradients, packed for the coming reduction
//   reduce_settings.h        dtype, divisor, hook and ranks of reductions
//   gradient_reduction.h     the reduction: reduce-scatter, all-reduce, division
//   partial_reduce_output.h  hybrid sharding: sums over the shards that wait for an all-reduce
//   sharded_grad.h           a reduced part is added to the `.grad` of its registry entry
//
// Local, but where a function says otherwise.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/partial_reduce_output.h"
#include "fully_shard/params/reduce_scatter_input.h"
#include "fully_shard/params/reduce_settings.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/tensor_parallel_terms.h"
#include "fully_shard/params/unsharded_grads.h"
#include "fully_shard/transport/stream_set.h"

#include <ATen/core/Tensor.h>

#include <memory>
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

  ReduceSettings& settings() { return settings_; }
  const ReduceSettings& settings() const { return settings_; }
  // What waits for a later reduction in full size, and what was summed over the shards
  // alone.
  UnshardedGrads& unsharded() { return unsharded_; }
  PartialReduceOutput& partial_output() { return partial_output_; }

  // Takes part in reductions: synchronises, and has something to reduce. The same on
  // every rank.
  bool reduces();
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
  void accumulate(int64_t index);

  // Makes room for a backward's gradients, if that was not done.
  void open();
  // Packs the gradient of parameter `index` and what was accumulated, if any. Where it
  // stays here it waits for publish_what_stayed(). That of a tensor-parallel member is
  // brought to where this lies, which is collective over its mesh if data moves; terms of
  // one that lies whole are packed by pack_accumulated(), all at once.
  void pack(int64_t index);
  // Packs all that is accumulated. Collective over the meshes of tensor-parallel members
  // whose gradients are terms.
  void pack_accumulated();
  void drop_accumulated();
  // What was packed; kNone: as on a rank that has nothing to pack.
  std::vector<ReduceScatterInput> take(
      ReduceScatterInput::Rows rows = ReduceScatterInput::Rows::kAllocated);
  void drop() {
    terms_.drop();
    stayed_.clear();
    take();
  }
  bool empty() const { return reduce_scatter_inputs_.empty(); }

  // Adds this rank's part of parameter `index`'s reduced gradient to its registry entry's
  // .grad, through the hooks that the user put on the entry.
  void publish(int64_t index, const at::Tensor& part);
  // The same of all gradients that no reduction takes, in the order in which they came.
  void publish_what_stayed();

 private:
  void pack_whole(int64_t index, const at::Tensor& gradient);
  std::vector<ReduceScatterInput> make_inputs(ReduceScatterInput::Rows rows);
  bool is_reduced(size_t index);
  std::vector<int64_t> reduced_params();
  void keep_here(int64_t index, const at::Tensor& gradient);
  void keep_zeros_here();
  FSDPParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  ReduceSettings settings_;
  std::vector<bool> unsynchronized_;  // trained without synchronisation since its last reduction
  UnshardedGrads unsharded_;
  PartialReduceOutput partial_output_;
  TensorParallelTerms terms_;
  StreamSet accumulated_on_;  // whose memory the waiting gradients may be
  // One per dtype, while a backward fills them.
  std::vector<ReduceScatterInput> reduce_scatter_inputs_;
  // By parameter, where no reduction takes them, until their backward has succeeded.
  std::vector<std::pair<int64_t, at::Tensor>> stayed_;
};

}  // namespace fsdp::internal
