// The handle of a unit: what FSDP2 gives as methods of the module. Cheap to copy; copies
// are handles of the same unit. Does not keep the module alive. Once the unit's
// parameters died, methods on them do nothing.
#pragma once

#include "device_mesh/api.h"
#include "fully_shard/communicate.h"
#include "fully_shard/counters.h"
#include "fully_shard/policies.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10 {
struct Event;
}

namespace torch::nn {
class Module;
}

namespace fsdp {

class FSDPModule;

namespace internal {
class Unit;
// For this library: the unit behind a handle, and back.
const std::shared_ptr<Unit>& unit_of(const FSDPModule& module);
FSDPModule handle_of(std::shared_ptr<Unit> unit);
}  // namespace internal

// The end of an unshard_async.
class FSDP_API UnshardHandle {
 public:
  // Waits for the all-gather; the parameters are unsharded afterwards. The first call
  // only: later ones, and one after the unit died, do nothing.
  void wait();

 private:
  friend class FSDPModule;
  explicit UnshardHandle(std::weak_ptr<internal::Unit> unit) : unit_(std::move(unit)) {}

  std::weak_ptr<internal::Unit> unit_;
};

class FSDP_API FSDPModule {
 public:
  // Path of this unit from its root; empty for a root.
  const std::string& name() const;
  // No enclosing unit. Local.
  bool is_root() const;
  // The modules that fully_shard was applied to, in that order, without those that died
  // since. Local.
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const;
  // This unit's group: the registry entries that travel together, each once, in the order
  // in which they were registered; none for a unit without parameters of its own, or once
  // they died. Local.
  std::vector<at::Tensor> parameters() const;
  // Whether the parameters of this unit and of all units below it are sharded, and
  // replicated, over the very same process groups. Units without parameters lie on none.
  // Local.
  bool spans_single_mesh() const;
  // The counters of all units of this unit's tree together. Local.
  Counters counters() const;

  // Gathers this unit's parameters now. Collective over the mesh unless they are
  // unsharded.
  void unshard();
  // Issues the all-gather and returns; touching a parameter waits as well. Collective
  // over the mesh.
  UnshardHandle unshard_async();
  // Frees the unsharded parameters, writing back what was written to them. Local.
  void reshard();

  // False: backward leaves gradients unreduced on this rank; they join the next
  // synchronised backward.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  // For hybrid sharding. False: gradients are reduced over the shards only, and the sums
  // are kept, in the size of shards. They join the next backward that reduces over the
  // replicas too.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  // False: the next backwards do not set .grad at their end (except on a mesh of one
  // rank) and leave parameters unsharded, until a backward runs with true. Local; every
  // rank must run the same number of backwards.
  void set_is_last_backward(bool is_last_backward);
  // Holds for the forwards to come. Collective over the mesh where to_world(n) is new to
  // it.
  void set_reshard_after_forward(ReshardAfterForward reshard_after_forward, bool recurse = true);
  // False: unsharded parameters stay after backward.
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  // False: no prefetch of this unit in backward; a touch still gathers.
  void set_unshard_in_backward(bool unshard_in_backward);
  // When these units issue their prefetch in backward.
  void set_backward_prefetch(BackwardPrefetch when, bool recurse = true);
  // True: modules compute in the parameters' and buffers' own dtype, for example in an
  // evaluation, and gathers bring that dtype. MixedPrecisionPolicy's param_dtype,
  // buffer_dtype, input casts and output_dtype, and gather codecs, have no effect until
  // it is false again. Parameters that are stored as codes are still decoded.
  // Reshards the units. Local; every rank must do the same. Throws ValueError, with
  // nothing changed, while a unit is held, in use or part of a live graph.
  void set_full_precision(bool full_precision, bool recurse = true);
  // The units whose all-gathers are issued when this one is entered, instead of the
  // expected successor.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  // This unit's gradients are summed over the ranks and divided by `factor` instead of
  // the number of ranks. Of this unit only: call it on every one of fsdp_modules(model)
  // for a whole model. REQUIRES: factor > 0.
  void set_gradient_divide_factor(double factor);
  // Leaves out plain parameters that were registered after fully_shard in modules of this
  // unit or of units below it, as FullyShardOptions::ignored_params does: nobody shards
  // or reduces them, and the caller keeps them equal on all ranks. They are known by
  // identity. Local; every rank must do the same. Throws ValueError for a tensor that is
  // undefined or belongs to a unit.
  void ignore(const std::vector<at::Tensor>& parameters);
  // Drops gradients of earlier backwards that were not synchronised. Local.
  void zero_pending_gradients(bool recurse = true);
  // Forgets what the schedule learned; the next steps learn it anew. Collective in
  // effect: call it on all ranks.
  void reset_lazy_init();

  // The hook gets the sums of this unit's gradients over all ranks before they are
  // divided: this rank's row [elements], padding included, in the dtype that sums are
  // made in. It is called once per reduction (one per dtype), on all ranks in the same
  // order, inside backward and under no_grad. What it writes in place becomes the
  // gradients, for instance the result of an all-reduce over other ranks. With a hook,
  // all trainable parameters get gradients, used or not. What it throws, backward throws.
  // Empty: no hook. Local; every rank must do the same.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook);
  // True: every trainable parameter gets a gradient from each backward of its root, zeros
  // where no rank used it, and units that no rank used are reduced as well. Local; every
  // rank must do the same.
  void set_reduce_scatter_unused_params(bool enable, bool recurse = true);

  // These functions gather this unit's parameters and add up its gradients over the ranks
  // that shard, instead of the mesh's process groups (communicate.h). Empty: the
  // process groups again. Each is called on all ranks in one order, but the two in any
  // order to each other, so they need groups of their own. They run without recording
  // gradients, and what they throw is reported as a failed collective of the unit. Pieces
  // that ReshardAfterForward::to_world keeps are gathered without them. Local; every rank
  // must do the same. Throws NotImplementedError where gathers need no other rank.
  using Communicate = fsdp::Communicate;
  void set_custom_all_gather(Communicate all_gather);
  void set_custom_reduce_scatter(Communicate reduce_scatter);
  // The next all-gather of this unit's tree waits on the device for this event, for
  // example for an optimizer that runs on another stream. Only that one waits; null: none
  // does. Throws ValueError for an event of another type of device. Local.
  void set_post_optim_event(std::shared_ptr<c10::Event> event);

  bool operator==(const FSDPModule&) const = default;

 private:
  friend const std::shared_ptr<internal::Unit>& internal::unit_of(const FSDPModule& module);
  friend FSDPModule internal::handle_of(std::shared_ptr<internal::Unit> unit);
  explicit FSDPModule(std::shared_ptr<internal::Unit> unit) : unit_(std::move(unit)) {}

  void for_each_unit(bool recurse, const std::function<void(internal::Unit&)>& visit);
  std::shared_ptr<internal::Unit> unit_;
};

// Accumulating gradients without communication: FSDP's no_sync.
//
//   for (size_t i = 0; i + 1 < batches.size(); ++i) {
//     fsdp::NoSyncGuard no_sync(fsdp::get_fsdp_module(*model));
//     loss(batches[i]).backward();               // no reduction
//   }
//   loss(batches.back()).backward();             // reduces the sum
//
// While it lives, backwards do not reduce the gradients of the unit and of the units
// below it: they add up on this rank, full, and join the next synchronised backward.
// zero_grad() does not reach them; FSDPModule::zero_pending_gradients() does. The end of
// the scope, by an exception too, gives every unit the setting that it had before, so
// guards nest and units that were switched off by hand stay off. Local, but every rank
// must do the same.
class [[nodiscard]] FSDP_API NoSyncGuard {
 public:
  [[nodiscard]] explicit NoSyncGuard(FSDPModule module);
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  struct Setting {
    std::weak_ptr<internal::Unit> unit;
    bool synchronized;
  };
  std::vector<Setting> before_;
};

}  // namespace fsdp
