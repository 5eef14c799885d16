// The reductions of one backward: when each group's gradients leave, and what is on the
// way. Collective over the mesh, so all ranks reduce the same groups in the same order,
// that of reduction_order.h. What arrives where, and when, may differ between ranks: what
// has not arrived when a group leaves is sent as zeros, and the last group leaves at the
// end, with a flag that tells of gradients that came late on some rank. Then all groups
// reduce once more.
//
// Destroying it before finish() is the abort: what is in flight is waited for. One thread
// at a time.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/step/reduction_order.h"
#include "fully_shard/units/root.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::internal {

class Reductions {
 public:
  // Whether the backward accumulates everywhere it can: neither autograd::grad(), nor
  // backward() with inputs.
  enum class Reach { kEverywhere, kInputs };
  explicit Reductions(Reach reach) : reach_(reach) {}
  Reductions(const Reductions&) = delete;

  Reach reach() const { return reach_; }
  // Takes part, after those that do so far.
  void add(FSDPParamGroup& group) { order_.add(&group); }
  // The backward has come to a group, which takes part. That it has come to one with
  // units below it says nothing of the groups before it.
  void touched(FSDPParamGroup& group);
  // What can leave by now does.
  void send_ready();
  bool has_left(FSDPParamGroup& group) const { return order_.has_left(&group); }
  // A gradient of a group that has left.
  void came_late() { late_ = Late::kSome; }
  const std::vector<FSDPParamGroup*>& groups() const { return order_.groups(); }
  void remove(FSDPParamGroup& group) { order_.remove(&group); }

  // The backward is done: what all groups have brought, but for what is kept with its
  // group. roots: that it has met.
  std::vector<ReducedRow> finish(const std::set<std::shared_ptr<Root>>& roots);
  void abort() noexcept;

 private:
  using Late = ReduceScatterInput::Late;
  int64_t send(FSDPParamGroup& group);  // how many: one for each dtype
  void receive_in_flight();
  void receive_last();
  void exchange_on_host(const std::set<std::shared_ptr<Root>>& roots, size_t first);
  bool is_late_anywhere() const;
  void send_late(const std::set<std::shared_ptr<Root>>& roots);

  const Reach reach_;
  ReductionOrder<FSDPParamGroup*> order_;
  std::optional<GradientReduction> in_flight_;  // one at a time bounds the memory
  std::vector<GradientReduction> received_;     // all with their replicas' sums but the last
  Late late_ = Late::kNone;                     // on this rank
};

}  // namespace fsdp::internal
