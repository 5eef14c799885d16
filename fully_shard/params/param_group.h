// The parameters of one unit, which are gathered, freed and reduced together.
//
//   member  -> on-demand storage -> group -> shard buffer        (strong)
//   registry entry -> owner -> group, member                     (strong)
//   group -> members, entries, storages                          (weak)
//
// States: sharded -> (issue_all_gather) gathering -> (touch) unsharded -> (reshard)
// sharded. In a world of one the members borrow the shard buffer for good, and nothing is
// ever gathered or freed.
#pragma once

#include "dtensor/internal/dtensor_impl.h"
#include "fully_shard/step/gradient_buffer.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/packed_layout.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class Unit;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct ManagedParam {
  std::string name;
  WeakTensor member;
  WeakTensor entry;
  OnDemandStorage* storage;  // null once its last tensor died
  DTensorSpecPtr spec;
  at::ScalarType dtype;
  bool unsynchronized =
      false;             // trained by a backward without synchronisation since its last reduction
  bool written = false;  // the unsharded copy was written and not yet written back
  std::optional<uint32_t> shard_version =
      {};                    // debug builds: of the local tensor when last seen; none after a write
  at::Tensor tripwire = {};  // made for the first gradient

  at::Tensor lock_member() const { return at::Tensor(member.lock()); }
  at::Tensor lock_entry() const { return at::Tensor(entry.lock()); }
};

// What the backward pass keeps per group.
struct BackwardNotes {
  bool touched_in_forward = false;   // stands in the next backward's order
  bool touched_in_backward = false;  // takes part in the running backward
  bool sent = false;                 // its reduction left in the running backward
};

class ParamGroup final : public OnDemandGroup {
 public:
  // Shards `tensors` (distinct, valid) over `mesh`: changes them in place into members
  // and makes the registry entries. Local, but for the first group on a mesh.
  static c10::intrusive_ptr<ParamGroup> create(const DeviceMesh& mesh,
                                               const std::vector<at::Tensor>& tensors,
                                               std::vector<std::string> names,
                                               std::shared_ptr<Unit> unit);
  ParamGroup(const DeviceMesh& mesh, std::shared_ptr<CommContext> context,
             std::shared_ptr<Unit> unit);
  ~ParamGroup() override;
  // The tripwires know the group weakly, and would keep it from being destroyed.
  void release_resources() override;

  // OnDemandGroup. touch() is collective over the mesh unless the group is unsharded and
  // fresh.
  void touch() override;
  void synchronize_metadata(int64_t index, c10::TensorImpl* impl) override;
  bool is_member(int64_t index, const c10::TensorImpl* impl) const override {
    return params_[static_cast<size_t>(index)].member._unsafe_get_target() == impl;
  }
  void mark_written(int64_t index) override;
  void evict_and_poison() override;
  void storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept override;
  const std::string& parameter_name(int64_t index) const override {
    return params_[static_cast<size_t>(index)].name;
  }

  // Collective, does not block; nothing when unsharded or gathering.
  void issue_all_gather();
  // Waits for an all-gather in flight and drops what it brought, failed or not.
  void discard_all_gather() noexcept;
  // Local. Writes back what was written; nothing when pinned.
  void reshard();
  // Gathers unless unsharded and fresh, without taking part in a forward or the schedule.
  // Collective.
  void unshard();
  // Unsharded until release(), whatever the schedule says, for raw access; nests.
  // Collective unless unsharded.
  void hold();
  // The last one reshards, writing back what was marked as written. Local.
  void release();
  bool held() const { return holds_ > 0; }
  void mark_all_written();
  // Drops what was written to the unsharded copy.
  void forget_writes();
  bool unsharded() const { return unsharded_.defined(); }
  bool unsharded_for_inference() const { return unsharded_in_ == Pass::kInference; }

  // The shard of parameter `index` is about to be read: it receives what was written to
  // the unsharded copy. That stays to be written back all the same, since whether a rank
  // reads its shard must not decide a gather. While the group is held, the shard stays as
  // it was. Local.
  void before_read(int64_t index);
  // An operator is about to write the shard of parameter `index`: waits for a gather in
  // flight and marks what is unsharded as stale.
  void before_write(int64_t index);

  // Autograd's hook: the member's full gradient is there.
  void gradient_arrived(int64_t index);
  // Nothing more to wait for before a reduction.
  bool gradients_complete() const;
  // Takes part in backwards' reductions: synchronises, and has something to reduce. The
  // same on every rank.
  bool reduces() const;
  // Without synchronisation: what this backward trains is reduced with the next
  // synchronised one, frozen by then or not.
  void keep_unsynchronized();
  // Makes room for this backward's gradients, if that was not done. A group without
  // synchronisation needs none.
  void open_buffers();
  // Packs gradients left on the members: delivered with synchronisation off, or after the
  // group was sent.
  void collect_pending();
  // Drops gradients left on the members.
  void drop_pending();
  std::vector<GradientBuffer> take_gradients();
  void drop_gradients();
  // Adds this rank's part of parameter `index`'s reduced gradient to its registry entry.
  void accumulate_gradient(int64_t index, const at::Tensor& part);
  double divisor() const;
  BackwardNotes& notes() { return notes_; }

  // Gives parameter `index` the dtype and this rank's part of `from`, which becomes what
  // the registry entry is to be. Throws ValueError while a graph, a gradient or a pointer
  // may still use the old one. Local.
  void change_dtype(int64_t index, const at::Tensor& from);

  // The registry entries made by create(), once: the group itself only knows them weakly.
  std::vector<at::Tensor> release_entries();

  const std::string& name() const;
  void rename(const std::string& prefix);
  uint32_t unit_number() const { return unit_number_; }
  const std::vector<ManagedParam>& params() const { return params_; }
  const std::shared_ptr<CommContext>& context() const { return context_; }
  const DeviceMesh& mesh() const { return mesh_; }
  int64_t padded_bytes() const { return context_->world() * layout_->row_bytes(); }

  // The unit's policies, as the schedule asks.
  bool reshards_after_forward() const;
  bool reshards_after_backward() const;
  bool prefetched_in_backward() const;
  std::vector<ParamGroup*> explicit_prefetch(bool backward) const;
  bool related_to(const ParamGroup& other) const;  // ancestor or descendant

 private:
  void adopt(const std::vector<at::Tensor>& tensors, std::vector<std::string> names);
  void open_shards(c10::Device device);
  at::Tensor local_view(int64_t index) const;
  void check_dtype_may_change(int64_t index, const at::Tensor& from) const;
  void make_member(const at::Tensor& tensor, int64_t index);
  void attach_hooks(const at::Tensor& member, int64_t index);
  void check_graph_is_current(Pass pass) const;
  void check_shards_are_announced();
  template <class Wait>
  void watch_gather(const Wait& wait);
  void wait_and_copy_out();
  void check_gathered_stamps(const at::Tensor& gathered);
  void write_back();
  void copy_to_shard(int64_t index);
  void free_unsharded();
  bool any_written() const;
  // Debug builds: looks for writes that no operator made. The error waits in the context
  // (raw_writes.h).
  void note_raw_writes();
  bool stale() const { return filled_writes_ != writes_; }
  static bool is_trainable(const ManagedParam& param);
  std::vector<int64_t> reduced_params() const;
  void pack(int64_t index);
  at::Tensor take_gradient(int64_t index);
  char* shard_data(int64_t index) const;
  char* unsharded_data(int64_t index) const;

  DeviceMesh mesh_;
  std::shared_ptr<CommContext> context_;
  std::shared_ptr<Unit> unit_;
  uint32_t unit_number_;
  std::vector<ManagedParam> params_;
  std::unique_ptr<PackedLayout> layout_;
  std::vector<at::Tensor> new_entries_;  // between create() and release_entries()
  at::Tensor shards_;     // uint8, [row bytes + stamp room]: this rank's row, sent as it is
  at::Tensor gathered_;   // uint8, [world, row bytes + stamp room], while gathering
  at::Tensor unsharded_;  // uint8, [world * row bytes], while unsharded
  Pending gather_;
  Stamp gather_stamp_;
  Pass unsharded_in_ = Pass::kTraining;
  // Staleness counts write calls, never versions, so that it is the same on every rank.
  uint64_t writes_ = 0;  // to shards
  static constexpr uint64_t kDiscarded = ~uint64_t{0};
  uint64_t filled_writes_ = 0;             // in the unsharded copy
  uint64_t forward_writes_ = 0;            // when a forward last recorded gradients
  std::vector<GradientBuffer> gradients_;  // one per dtype, while a backward fills them
  BackwardNotes notes_;
  int64_t holds_ = 0;
  at::Tensor
      poisoned_;  // test mode: what was emptied last, kept so that pointers into it read poison
};

}  // namespace fsdp::internal
