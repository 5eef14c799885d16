// The gradients of a group on their way from autograd to the `.grad` of the registry
// entries: what has arrived, what waits, and what goes into the next reduction.
//
//   UnshardedGrads       full gradients that wait for a later reduction
//   TensorParallelTerms  gradients of replicated tensor-parallel members, to be summed at once
//   AccumulatedGrads     all of a group's, with what is packed for the coming reduction
//
// Then reduce_scatter.h reduces what was packed, and sharded_grad.h adds a reduced part
// to the `.grad` of its registry entry. Local, but where a function says otherwise.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/sharded_grad.h"
#include "fully_shard/transport/streams.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fsdp::internal {

// Unsharded gradients of one group that are accumulated for a later reduction (PyTorch's
// unsharded_accumulated_grad): on the members, as autograd leaves them, or here, where
// they are added up in another dtype than the member's. Local.
class UnshardedGrads {
 public:
  // `info` and `params` outlive it. `writes`: of the group, for tripwires.
  UnshardedGrads(const GroupInfo& info, std::vector<FSDPParam>& params,
                 std::weak_ptr<ShardWrites> writes);
  ~UnshardedGrads();
  UnshardedGrads(const UnshardedGrads&) = delete;

  // What autograd left on the member of parameter `index` waits, to be added up in
  // `dtype`.
  void keep(int64_t index, at::ScalarType dtype);
  bool waits(int64_t index) const;
  // All that waits, without a graph, of the member's dtype or of what it was added up in;
  // undefined for none. A tripwire stays on the member. Throws NotImplementedError where
  // the layout is not strided.
  at::Tensor take(int64_t index);
  // Whether take() has left tripwires since they were last removed.
  bool has_left_tripwires() const { return has_left_tripwires_; }
  void remove_tripwires();
  void drop(int64_t index);

 private:
  at::Tensor take_from_member(int64_t index);
  void check_layout(const at::Tensor& gradient, int64_t index) const;
  void count(int64_t index);
  void set_counted(int64_t index, int64_t bytes);
  FSDPParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  std::weak_ptr<ShardWrites> writes_;
  std::vector<at::Tensor> sums_;  // by parameter; undefined for none
  std::vector<int64_t> bytes_;    // by parameter, as counted
  bool has_left_tripwires_ = false;
};

// Gradients of replicated tensor-parallel members that come as terms of a sum over the
// tensor-parallel ranks. They wait for those of the other parameters of a group, so that
// all are summed at once.
class TensorParallelTerms {
 public:
  explicit TensorParallelTerms(const GroupAccounts& accounts) : accounts_(accounts) {}
  ~TensorParallelTerms() { drop(); }
  TensorParallelTerms(const TensorParallelTerms&) = delete;

  // `gradient`: a DTensor, of parameter `index`; added to what was kept, in `dtype`.
  void keep(int64_t index, const at::Tensor& gradient, at::ScalarType dtype);
  bool has(int64_t index) const;
  // The sums, plain and whole, with their parameters; none is kept any longer. Collective
  // over the meshes of the members.
  std::vector<std::pair<int64_t, at::Tensor>> take_sums();
  void drop();

 private:
  struct Term {
    int64_t index;
    at::Tensor gradient;
  };

  const GroupAccounts& accounts_;
  std::vector<Term> terms_;  // of a running backward
};

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
  // been added to gradients of this rank alone (replicate_members(),
  // on_demand/gate_arguments.h).
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
  // What was packed.
  std::vector<ReduceScatterInput> take();
  void drop() {
    terms_.drop();
    stayed_.clear();
    take();
  }
  bool empty() const { return reduce_scatter_inputs_.empty(); }

  // Accumulates all gradients that no reduction takes into the entries' .grad, in the
  // order in which they came (accumulate_sharded_grad()).
  void publish_what_stayed();

 private:
  void pack_whole(int64_t index, const at::Tensor& gradient);
  std::vector<ReduceScatterInput> make_inputs();
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
