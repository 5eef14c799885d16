// One outermost backward over the groups of one process group: which take part, and what
// their reductions bring. What leaves when, and what is on the way, is in reductions.h.
// Runtime makes one when a backward meets the first group; finish() makes the results
// visible; destroying it before is the abort: partial gradients are dropped, what is in
// flight is waited for, and the units of the roots that took part go back to sharded, so
// the next step is clean. See docs/design/gradients.md.
//
// Four blocks, backward touching d c b a:
//   touched(d) touched(c)      nothing leaves: d's gradients may still come
//   gradients of d complete    d leaves; its transport works while c computes
//   touched(b)                 (d would leave now, complete or not)
//   ...
//   finish()                   a leaves last; then .grad is what all have brought
//
// A root's units join the order when the backward first meets one of them: those that owe
// a reduction, in the reverse order of their first forward touches. Collective; one
// thread at a time.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/step/owed_reductions.h"
#include "fully_shard/step/reductions.h"
#include "fully_shard/units/root.h"

#include <map>
#include <memory>
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
  void prefetch_after_gradients(Root& root);
  // The backward is done. Gives whether it has reduced something, so that all ranks have
  // come to its end.
  bool finish();
  void remove(FSDPParamGroup& group);

 private:
  using Groups = std::vector<FSDPParamGroup*>;
  bool accumulates_everywhere() const {
    return reductions_.reach() == Reductions::Reach::kEverywhere;
  }
  void meet(const std::shared_ptr<Root>& root);
  Groups owing_groups_of(const std::shared_ptr<Root>& root) const;
  void publish(std::vector<ReducedRow> results);
  void update_owed();
  void end_roots();
  void check_afterwards() const;
  void abort() noexcept;

  OwedReductions<FSDPParamGroup*>& owed_;
  HeldBack& held_back_;
  std::set<std::shared_ptr<Root>> roots_;  // met so far
  std::set<FSDPParamGroup*> part_takers_;  // touched, or with a gradient
  Reductions reductions_;
  enum class State { kRunning, kFinished } state_ = State::kRunning;
};

}  // namespace fsdp::internal
