// One outermost backward over the groups of one process group: which take part, when
// their reductions leave (reduction_order.h), which are on the way, and what they bring.
// Runtime makes one when a backward meets the first group; finish() makes the results
// visible; destroying it before is the abort: partial gradients are dropped, what is in
// flight is waited for, and the units of the roots that took part go back to sharded, so
// the next step is clean. See docs/design/gradients.md.
//
// Four blocks, backward coming to d c b a:
//   come_to(d) come_to(c)      nothing leaves: d's gradients may still come
//   gradients of d complete    d leaves; its transport works while c computes
//   come_to(b)                 (d would leave now, complete or not)
//   ...
//   finish()                   a leaves last; then .grad is what all have brought
//
// All ranks reduce the same groups in the same order. What arrives where, and when, may
// differ: what has not arrived when a group leaves is sent as zeros, and the last group
// leaves at the end, with a flag that tells of gradients that came late on some rank.
// Then all groups reduce once more.
//
// A root's units join the order when the backward first meets one of them: those whose
// reduction is pending, in the reverse order of their first forward touches. Collective;
// one thread at a time.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/step/reduction_order.h"
#include "fully_shard/units/unit.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

namespace fsdp::internal {

class BackwardRun {
 public:
  // `pending`: kept and written, groups that leave are taken off. `held_back`: what
  // earlier backwards brought that were not the last.
  using HeldBack = std::map<std::shared_ptr<Root>, std::vector<ReducedRow>>;
  BackwardRun(PendingReductions<FSDPParamGroup*>& pending, HeldBack& held_back);
  ~BackwardRun();
  BackwardRun(const BackwardRun&) = delete;

  // A group was touched.
  void come_to(FSDPParamGroup& group);
  void gradient_arrived(FSDPParamGroup& group, int64_t index);
  // Gathers what a unit of `root` put off, if its gradients have left.
  void prefetch_after_gradients(Root& root);
  // The backward is done. Gives whether it has reduced something, so that all ranks have
  // come to its end.
  bool finish();
  void remove(FSDPParamGroup& group);

 private:
  using Groups = std::vector<FSDPParamGroup*>;
  using Late = ReduceScatterInput::Late;
  // Whether it accumulates everywhere it can: neither autograd::grad(), nor backward()
  // with inputs.
  enum class Reach { kEverywhere, kInputs };

  void meet(const std::shared_ptr<Root>& root);
  Groups groups_to_reduce(const std::shared_ptr<Root>& root) const;
  void add_to_order(FSDPParamGroup& group);
  // What can leave by now does.
  void send_ready();
  int64_t send(FSDPParamGroup& group);  // how many: one for each dtype
  void receive_in_flight();
  void receive_last();
  std::vector<ReducedRow> receive_all();
  void exchange_on_host(size_t first);
  bool is_late_anywhere() const;
  void send_late();
  void publish(std::vector<ReducedRow> results);
  void update_pending();
  void end_roots();
  void check_afterwards() const;
  void abort() noexcept;

  PendingReductions<FSDPParamGroup*>& pending_;
  HeldBack& held_back_;
  const Reach reach_;
  std::set<std::shared_ptr<Root>> roots_;  // met so far
  std::set<FSDPParamGroup*> part_takers_;  // touched, or with a gradient
  ReductionOrder<FSDPParamGroup*> order_;
  std::optional<GradientReduction> in_flight_;  // one at a time bounds the memory
  std::vector<GradientReduction> received_;     // all but the last have their sum over replicas
  Late late_ = Late::kNone;  // whether a gradient came when its group had left, on this rank
  enum class State { kRunning, kFinished } state_ = State::kRunning;
};

// What the ranks of a device mesh tell each other on the host at the end of a backward
// (exchange_after_backward.cc): of all groups of `roots` on one process group, and of
// those reductions of theirs, which have been waited for. They learn which parameters
// were used, and what the replicas wrote. Returns whether gradients came late on some
// rank. Throws, on all ranks alike, what RankAgreement and HostExchange throw. REQUIRES:
// reductions, and groups that exchange on the host (GroupInfo). Blocks; collective over
// the mesh.
bool exchange_after_backward(const std::set<std::shared_ptr<Root>>& roots,
                             std::span<GradientReduction> reductions, bool late);

}  // namespace fsdp::internal
