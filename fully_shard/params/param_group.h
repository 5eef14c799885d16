// The parameters of one unit, which are gathered, emptied and reduced together. A group
// composes what its parts know; when something is to happen is decided above it
// (group_driver.h).
//
//   ShardedParam    one parameter: handles, shape, requires_grad
//   ShardBuffer     this rank's shards
//   UnshardedCopy   the full parameters while they are there, and the state of that (residency.h)
//   StagedRow       mixed precision, offloading: the shards as they are gathered
//   PostForwardShards  a part of them that a forward leaves, where asked for
//   ShardWrites     which of the two is newest
//   AgreedValues    what all ranks must have alike
//   WriteRuns       how often the shards were written
//   ReplicaWrites   whether the replicas wrote them alike
//   GroupGradients  full gradients, pending and packed
//
// Ownership:
//   member -> on-demand storage -> group -> shard buffer        (strong)
//   registry entry -> owner -> group, member                    (strong)
//   group -> members, entries, storages                         (weak)
//
// More than twenty public functions: it implements OnDemandGroup, and what the gate,
// registry entries and the runtime need of a group has no other place.
#pragma once

#include "fully_shard/params/agreed_values.h"
#include "fully_shard/params/gather_count.h"
#include "fully_shard/params/group_driver.h"
#include "fully_shard/params/group_gradients.h"
#include "fully_shard/params/post_forward_shards.h"
#include "fully_shard/params/replica_writes.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/params/shard_home.h"
#include "fully_shard/params/shard_writes.h"
#include "fully_shard/params/sharded_param.h"
#include "fully_shard/params/staged_row.h"
#include "fully_shard/params/unsharded_copy.h"
#include "fully_shard/params/write_runs.h"
#include "fully_shard/units/unit.h"
#include "on_demand/on_demand_storage.h"
#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class ParamGroup final : public OnDemandGroup {
 public:
  // Turns the parameters' tensors into members; new_entries() has what the registry is to
  // hold. See group_creation.h.
  ParamGroup(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
             std::shared_ptr<Transport> replicas, std::shared_ptr<Unit> unit,
             std::shared_ptr<GroupDriver> driver, std::vector<ShardedParam> params);
  ~ParamGroup() override;
  // The tripwires know the group weakly, and would keep it from being destroyed.
  void release_resources() override;

  // OnDemandGroup. touch() is collective over the mesh unless the group is resident and
  // fresh.
  void touch() override;
  void synchronize_metadata(int64_t index, c10::TensorImpl* impl) override;
  bool is_member(int64_t index, const c10::TensorImpl* impl) const override;
  void mark_written(int64_t index) override;
  void announce_write(int64_t index) override;
  void evict_and_poison() override;
  void storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept override;
  at::Tensor gradient_share(int64_t index, const at::Tensor& gradient) const override;
  const std::string& parameter_name(int64_t index) const override;

  // Issues the gather; does not block; nothing unless sharded. Collective.
  void issue_gather();
  // Waits for it, fills the members and checks that all ranks agree; nothing unless
  // gathering.
  void fill();
  // The gather is issued because the schedule expects a touch.
  void prefetch();
  // Waits for a gather in flight and drops what it brought, failed or not: it was in
  // vain.
  void drop_gather() noexcept;
  // By hand: issues the gather and returns. Collective.
  void unshard_async();
  // unshard_async() and fill(), without taking part in a forward or the schedule.
  // Collective.
  void unshard();
  // Local. Writes back what was written; nothing when pinned or held, or not resident.
  void reshard();
  // The same, and keeps what the backward is to gather, where the unit asks for that.
  void reshard_after_forward();
  // Between forward and backward, one n-th of the parameters stays on each of n
  // neighbouring ranks; null: only the shards do. Local.
  void set_neighbours(std::shared_ptr<Transport> neighbours);
  void drop_post_forward_shards();
  // Empties a copy that is older than the shards.
  void empty_if_stale();
  // What was written to the members goes to the shards, and the copy is emptied: the next
  // read gathers what every rank wrote. Nothing when nothing was written, or held.
  void settle_member_writes();
  // Resident until release(), whatever the schedule says, for raw access; nests.
  // Collective unless resident.
  void hold();
  // The last one reshards. Local.
  void release();
  // The same, and what was written meanwhile need not be alike on all ranks: each rank's
  // part of it goes to its shards. Local.
  void release_own_parts();
  void mark_all_written();
  // Drops what was written to the copy.
  void forget_writes();

  // The shard of parameter `index` is about to be read: it receives what was written to
  // the copy. That stays to be written back all the same, since whether a rank reads its
  // shard must not decide a gather. While the group is held, the shard stays as it was.
  // Local.
  void before_read(int64_t index);
  // An operator is about to write the shard of parameter `index`: waits for a gather in
  // flight, and makes the copy stale.
  void before_write(int64_t index);
  // Parameter `index` is about to be written with plain tensors without dimensions, whose
  // numbers have this hash: the next gather compares it. Local.
  void before_factors(int64_t index, uint64_t hash);
  // Other values took the place of all of parameter `index`, by way of `written`, its
  // entry or a view of that. Those of `source`, which is plain, the next gather compares;
  // it is undefined where they are no plain tensor's. Reads all of it, if it is on the
  // CPU. Local.
  void after_overwrite(int64_t index, const at::Tensor& written, const at::Tensor& source);
  // False while the parameters are on the meta device: everything but materialize()
  // throws then, with their names.
  bool has_values() const { return !shards_->device().is_meta(); }
  void check_has_values() const;
  // Puts the shards on `device`. Parameter by parameter, value_of(tensor) is the whole
  // value of what the parameter was on the meta device, on any device; undefined: zeros,
  // to be written. Nothing where there are values; where value_of throws, nothing
  // changed. Local.
  void materialize(c10::Device device,
                   const std::function<at::Tensor(const at::Tensor&)>& value_of);
  // Gives parameter `index` the dtype and this rank's part of `from`, which becomes what
  // the registry entry is to be. Throws ValueError while a graph, a gradient or a pointer
  // may still use the old one. Local.
  void change_dtype(int64_t index, const at::Tensor& from);

  // Throws ValueError where a member can not have another dtype now, as for
  // change_dtype().
  void check_members_may_change() const;
  // The dtype of floating members; unset: that of their entries. Throws as the check,
  // with nothing changed. REQUIRES: the group was made with a param_dtype. Local.
  void set_param_dtype(std::optional<at::ScalarType> dtype);

  // A forward that records gradients begins to use the group.
  void graph_recorded();
  // Throws where a graph older than the last write runs backward.
  void check_graph_is_current(Pass pass) const;
  void check_shards_are_announced();

  const std::string& name() const;
  // Of the unit on its process group, the same on every rank.
  uint32_t number() const { return number_; }
  // What a collective of this group is issued as; with the user's own function, if there
  // is one.
  Issue issue(NoticeWords words, const Communicate* custom = nullptr) const;
  void rename(const std::function<std::string(const std::string& name)>& renamed);
  std::vector<ShardedParam>& params() { return params_; }
  const std::vector<ShardedParam>& params() const { return params_; }
  const ShardBuffer& shards() const { return *shards_; }
  // Of all shards in the members' dtypes: as the full parameters lie, too.
  const PackedLayout& member_layout() const;
  // Mixed precision: members have a dtype of their own.
  bool casts() const;
  GroupGradients& gradients() { return gradients_; }
  const Residency& residency() const { return copy_.residency(); }
  GatherCount& gather_count() { return gather_count_; }
  ShardWrites& writes() { return writes_; }
  AgreedValues& agreed_values() { return agreed_; }
  const WriteRuns& write_runs() const { return write_runs_; }
  Unit& unit() const { return *unit_; }
  ShardDim& dim() const { return *dim_; }
  // To the ranks with the same shards; null where there are none.
  Transport* replicas() const { return replicas_.get(); }
  // The words that the replicas tell each other here, by replica. Blocks. REQUIRES:
  // replicas(). Collective over them.
  std::vector<uint64_t> words_of_replicas(uint64_t word) const;
  // What travels with a sum of gradients over the replicas: `writing` is a word of
  // ReplicaWrites.
  NoticeWords word_for_replicas() const { return {.writing = replica_writes_.word()}; }
  // Throws ValueError, on all ranks alike, where one replica wrote the shards since the
  // last such sum and another did not. of_replicas: the words of all, by replica.
  void check_replica_writes(const std::vector<NoticeWords>& of_replicas);
  // One rank: nothing is ever sent, and members borrow the shards, unless these are of
  // another dtype or on another device.
  bool is_alone() const { return dim_->shard_count() == 1 && !replicas_; }
  const GroupAccounts& accounts() const { return accounts_; }
  const DeviceMesh& mesh() const { return mesh_; }
  const std::shared_ptr<GroupDriver>& driver() const { return driver_; }
  // Where its members are, and compute: the meta device while there are no values.
  c10::Device device() const;

 private:
  friend class GroupCreation;

  bool may_be_emptied() const;
  void asked_by_hand();
  std::vector<NoticeWords> gathered_words();
  void check_agreement(const std::vector<NoticeWords>& of_shards);
  void check_writes(const std::vector<NoticeWords>& of_shards);
  void shard_is_written(int64_t index) {
    write_runs_.written(holders_[static_cast<size_t>(index)]);
    replica_writes_.written();
  }
  std::string difference_along(int64_t mesh_dim);
  [[noreturn]] void report_difference(const std::string& what);
  [[noreturn]] void report_difference_in(int64_t replica);
  void write_back();
  void await_unused_gather();
  void write_back_own_parts();
  void copy_to_shard(int64_t index);
  void empty_by_schedule();
  void empty_copy();
  void await_optimizer();
  PackedRow row_to_gather();
  bool is_offloaded() const { return home_ != ShardHome::kWithMembers; }
  bool are_staged() const { return casts() || is_offloaded(); }
  void open_shards(c10::Device device);
  void open_staged_row();
  void drop_staged_row();
  void take_start_value(int64_t index, const at::Tensor& whole);
  void make_member(int64_t index);
  void note_raw_writes();
  void note_copy(int64_t index, const at::Tensor& whole);
  void check_member_may_change(int64_t index, int64_t own_graphs, const char* what) const;
  void rebuild_shards(int64_t changed, const at::Tensor& from);
  ShardedParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  DeviceMesh mesh_;
  std::shared_ptr<ShardDim> dim_;
  std::shared_ptr<Transport> replicas_;
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<GroupDriver> driver_;
  ShardHome home_;
  uint32_t number_;
  std::vector<ShardedParam> params_;
  GroupAccounts accounts_;
  std::unique_ptr<ShardBuffer> shards_;
  std::unique_ptr<StagedRow> staged_row_;            // null: what is gathered are the shards
  std::unique_ptr<PostForwardShards> post_forward_;  // null: nothing is kept
  UnshardedCopy copy_;
  ShardWrites writes_;
  AgreedValues agreed_;
  WriteRuns write_runs_;
  ReplicaWrites replica_writes_;
  std::vector<Holders> holders_;  // by parameter
  GatherCount gather_count_;
  GroupGradients gradients_;
};

}  // namespace fsdp::internal
