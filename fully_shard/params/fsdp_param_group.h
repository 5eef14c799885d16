// The parameters of one unit, which are unsharded, resharded and reduced together
// (PyTorch's FSDPParamGroup). A group is a composition of what its parts know; when
// something is to happen is decided above it (GroupDriver).
//
//   GroupInfo         its unit and ranks
//   FSDPParam         one parameter: handles, shape, requires_grad
//   ShardBuffer       this rank's shards
//   UnshardedParams   the gather and the full parameters
//   RankAgreement     what all ranks must have alike
//   WriteCoherence    what is written to members and registry entries
//   AccumulatedGrads  full gradients, waiting and packed
//
// Ownership:
//   member -> on-demand storage -> group -> shard buffer        (strong)
//   registry entry -> owner -> group, member                    (strong)
//   group -> members, entries, storages                         (weak)
//
// Made and remade by group_builder.h.
#pragma once

#include "fully_shard/params/accumulated_grads.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/rank_agreement.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/params/write_coherence.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class FSDPParamGroup final : public OnDemandGroup {
 public:
  // `device`: of the members; on the meta device there are no values yet. See
  // group_builder.h.
  FSDPParamGroup(GroupInfo info, std::vector<FSDPParam> params, c10::Device device);
  ~FSDPParamGroup() override;

  // OnDemandGroup. touch() is collective over the mesh unless the group is unsharded and
  // current.
  void touch() override;
  void synchronize_metadata(int64_t index, c10::TensorImpl* impl) override;
  bool is_member(int64_t index, const c10::TensorImpl* impl) const override;
  void member_written(int64_t index) override { writes_.member_written(index); }
  void before_member_write(int64_t index) override { writes_.before_member_write(index); }
  void evict_and_poison() override;
  void storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept override;
  at::Tensor gradient_share(int64_t index, const at::Tensor& gradient) const override;
  const std::string& parameter_name(int64_t index) const override;

  // Issues the gather; does not block; nothing unless sharded. Collective.
  void issue_unshard();
  // Waits for it, fills the members and checks that all ranks agree; nothing unless
  // gathering.
  void wait_unshard();
  // Local. Writes back what was written; nothing when pinned or held, or not unsharded.
  void reshard();
  // The same, and keeps what the backward is to gather, where the unit asks for that.
  void reshard_after_forward();
  // A forward that records gradients begins to use the group.
  void graph_recorded();

  const GroupInfo& info() const { return info_; }
  std::vector<FSDPParam>& params() { return params_; }
  const std::vector<FSDPParam>& params() const { return params_; }
  ShardBuffer& shards() { return shards_; }
  const ShardBuffer& shards() const { return shards_; }
  UnshardedParams& unsharded() { return unsharded_; }
  const UnshardedParams& unsharded() const { return unsharded_; }
  RankAgreement& agreement() { return agreement_; }
  WriteCoherence& writes() { return writes_; }
  AccumulatedGrads& gradients() { return gradients_; }
  const AccumulatedGrads& gradients() const { return gradients_; }

 private:
  void put_inner_shards_together();
  void empty(Leaves leaves);

  GroupInfo info_;
  std::vector<FSDPParam> params_;
  ShardBuffer shards_;
  std::shared_ptr<ShardWrites> shard_writes_ = std::make_shared<ShardWrites>();
  UnshardedParams unsharded_;
  RankAgreement agreement_;
  WriteCoherence writes_;
  AccumulatedGrads gradients_;
};

// Whoever is about to change or look at groups and their schedule without a touch: on a
// device autograd's own thread may still be cleaning up after a backward that failed
// (OpenBackward). Waits for that in all groups of the unit's root. Local.
void await_failed_backward(const Unit& unit);

// A group unsharded explicitly and held, outside the schedule's turns:
// FSDPModule::unshard(), SummonFullParams, Unsharded.

// Issues the gather and returns. Collective.
void unshard_async(FSDPParamGroup& group);
// The same, and waits for it. Collective.
void unshard(FSDPParamGroup& group);
// Unsharded until release(), whatever the schedule says; nests. Collective unless
// unsharded.
void hold(FSDPParamGroup& group);
// The last one reshards. Local.
void release(FSDPParamGroup& group);
// The same, and what was written meanwhile need not be alike on all ranks: each rank's
// part of it goes to its shards. Local.
void release_own_parts(FSDPParamGroup& group);

}  // namespace fsdp::internal
