// One outermost backward over the groups of one process group: which take part, the order
// in which their reductions leave, and what is on the way. Runtime makes one when a
// backward meets the first group; finish() makes the results visible; destroying it
// before is the abort: partial gradients are dropped, what is in flight is waited for,
// and the units of the roots that took part go back to sharded, so the next step is
// clean. See docs/design/gradients.md.
//
// Four blocks, backward touching d c b a:
//   touched(d) touched(c)      nothing leaves: d's gradients may still come
//   gradients of d complete    d leaves; its transport works while c computes
//   touched(b)                 (d would leave now, complete or not)
//   ...
//   finish()                   a leaves last, with the flag that tells of late gradients
//
// A root's units join the order when the backward first meets one of them: those that owe
// a reduction, in the reverse order of their first forward touches. Collective; one
// thread at a time.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/gradient_reduction.h"
#include "fully_shard/step/owed_reductions.h"
#include "fully_shard/step/reduction_order.h"
#include "fully_shard/units/root.h"

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::internal {

class BackwardRun {
 public:
  // `owed`: kept and written, groups that leave are taken off. `held_back`: what earlier
  // backwards brought that were not the last.
  using HeldBack = std::map<std::shared_ptr<Root>, std::vector<ReducedRow>>;
  BackwardRun(OwedReductions<FSDPParamGroup*>& owed, HeldBack& held_back);
  ~BackwardRun();
  BackwardRun(const BackwardRun&) = delete;

  // A group was touched, or received a gradient.
  void touched(FSDPParamGroup& group);
  void gradient_arrived(FSDPParamGroup& group, int64_t index);
  // Gathers what a unit of `root` put off, if its gradients have left.
  void prefetch_after_gradients(Root& root) const;
  // The backward is done.
  void finish();
  void remove(FSDPParamGroup& group);

 private:
  using Late = ReduceScatterInput::Late;
  void meet(const std::shared_ptr<Root>& root);
  void send_ready();
  int64_t send(FSDPParamGroup& group);  // how many reductions: one for each dtype
  void receive_in_flight();
  void receive_last();
  void exchange_on_host(size_t first);
  bool is_late_anywhere() const;
  void send_late();
  void publish();
  void update_owed();
  void end_roots();
  void check_afterwards() const;
  void abort() noexcept;

  OwedReductions<FSDPParamGroup*>& owed_;
  HeldBack& held_back_;
  bool accumulates_everywhere_;            // neither autograd::grad, nor backward with inputs
  std::set<std::shared_ptr<Root>> roots_;  // met so far
  std::set<FSDPParamGroup*> part_takers_;  // touched, or with a gradient
  ReductionOrder<FSDPParamGroup*> order_;
  std::optional<GradientReduction> in_flight_;  // one at a time bounds the memory
  std::vector<GradientReduction> received_;     // all with their replicas' sums but the last
  Late late_ = Late::kNone;                     // on this rank
  enum class State { kRunning, kFinished } state_ = State::kRunning;
};

}  // namespace fsdp::internal
