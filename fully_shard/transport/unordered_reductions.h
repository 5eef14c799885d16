// Reductions among ranks that share memory, each of which sends the gradients of the
// units that it uses, in an order of its own: they are matched by unit. Where not all
// ranks use a unit, those that do not add nothing to its sum.
//
//   reductions->plan(7, {3, 1});                      // of this backward
//   auto sum = reductions->send({.root = 7, .unit = 3, .rows = rows, ...});
//   if (reductions->await(*sum)) use(sum->take());    // all rows have come already
//   ...
//   for (const auto& number : reductions->end_step({...})) ...  // what any rank sent
//
// A **step** is what lies between two ends of a last backward; ranks may run different
// numbers of backwards in it. The first backwards of all ranks belong together, and so
// on. When a rank ends a step it tells the others, so each knows then that everything of
// the step has come, since messages of a rank come in order. Before that a sum is
// complete once all ranks have told what they send (reduction_plans.h). Rows are added in
// the order of the ranks.
//
// A backward that throws tells the others, whose own backward then throws as well: all
// drop what the step has brought until then, and go on with the next backward.
//
// Local but for end_step(); used by one thread at a time. See docs/design/gradients.md.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "fully_shard/transport/peer_waits.h"
#include "fully_shard/transport/reduction_plans.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class UnorderedReduction;

class UnorderedReductions {
 public:
  // `reductions`: of the channel's group; their failures end these, too.
  UnorderedReductions(std::shared_ptr<PeerChannel> channel, Collectives reductions);

  // The backward will send these units of `root`, in this order, each once in round 0.
  // Before any of them is sent; once for each root.
  void plan(uint32_t root, UnitNumbers units);
  // Rows of a unit, for round 0 of what was planned, or a further round.
  struct Rows {
    uint32_t root = 0, unit = 0, round = 0, part = 0;
    at::Tensor rows;  // uint8 [ranks, bytes], row r for rank r; not written any more
    at::ScalarType dtype = at::kFloat;
    std::string what;  // in errors of all ranks
  };
  std::unique_ptr<UnorderedReduction> send(Rows rows);
  // Whether all its rows have come. Waits for them where ranks that wait so cannot wait
  // for one another; in a backward that is not the last, half a second for ranks that
  // have not begun theirs, once. Throws where a rank's backward has thrown.
  enum class Backward { kLast, kNotLast };
  bool await(UnorderedReduction& reduction, Backward backward);

  // The backward has sent all that it sends, and others follow in the step.
  void end_backward();
  // The same of the last backward: waits for all ranks to end the step, then gives what
  // was sent in it, here and elsewhere, in one order on all ranks. sent: here, without
  // what failed backwards sent. All of these have come. Throws where a rank's backward
  // has thrown. Collective over the dimension.
  std::vector<ReductionNumber> end_step(std::vector<ReductionNumber> sent);
  // Takes part in a sum to which this rank has added nothing. REQUIRES: end_step() gave
  // `number`. bytes: of a row.
  std::unique_ptr<UnorderedReduction> join(const ReductionNumber& number, int64_t bytes,
                                           at::ScalarType dtype, std::string what);
  // All sums were taken: what others have sent for units that are not here is dropped.
  void begin_step();
  // The backward has thrown. All that was sent in the step is void. Nothing where no
  // backward has said anything since the last one ended.
  void fail_backward() noexcept;

  int64_t rank() const { return reductions_.rank(); }
  int64_t ranks() const { return channel_->size(); }

 private:
  friend class UnorderedReduction;

  // What another rank has told of its step. A backward that has thrown makes all before
  // the next valid one void.
  struct Told {
    uint32_t ended = 0;                        // backwards, those that have thrown among them
    std::map<uint32_t, uint32_t> failed = {};  // backwards that have, and because of which rank's
    uint32_t resumes_at = 0;                   // its first valid backward
    std::optional<uint32_t> step_end = std::nullopt;  // the same, when it ended the step
  };

  ReductionNumber next(ReductionNumber::Kind kind) const;
  void tell(const ReductionNumber& number, const std::vector<uint32_t>& words);
  void hear(int64_t rank);
  void hear(int64_t rank, const ReductionNumber& number, const std::vector<uint32_t>& words);
  BackwardPlans& plans(uint32_t backward);
  bool is_over(int64_t rank, const UnorderedReduction& reduction);
  BackwardPlans::Sends planned(int64_t rank, const UnorderedReduction& reduction);
  bool may_still_send(int64_t rank, const UnorderedReduction& reduction);
  bool has_told(int64_t rank, const UnorderedReduction& reduction);
  bool all_have_told(const UnorderedReduction& reduction);
  bool await_plans(const UnorderedReduction& reduction, Backward backward);
  bool has_ended_step(int64_t rank) const;
  std::optional<uint32_t> failure_of(int64_t rank, uint32_t last) const;
  void check_failures(uint32_t last);
  void await_end_of(int64_t rank);

  const std::shared_ptr<PeerChannel> channel_;
  const Collectives reductions_;
  uint32_t step_ = 0, backward_ = 0;
  uint32_t valid_from_ = 0;          // what backwards before it sent is void
  std::optional<uint32_t> culprit_;  // the rank because of which this one's backward throws
  uint32_t plans_told_ = 0;          // in this backward
  enum class Stage {
    kSilent,    // nothing was told of this backward
    kTold,      // something was
    kStepOver,  // all that was sent in the step has come
  } stage_ = Stage::kSilent;
  Patience patience_;  // with ranks that have not begun a backward that is not the last
  std::map<uint32_t, BackwardPlans> plans_;  // by backward
  std::vector<Told> told_;                   // by rank
};

// A sum of one unit's rows, of one dtype. Its owner outlives it.
class UnorderedReduction {
 public:
  UnorderedReduction(UnorderedReductions& owner, const ReductionNumber& number, uint32_t root,
                     at::ScalarType dtype, std::string what, int64_t bytes);

  const ReductionNumber& number() const { return number_; }
  // Looks; does not block.
  bool is_there();
  // REQUIRES: is_there(). The sum for this rank, [elements] of sum_dtype(dtype). Throws
  // where a rank has sent rows of another size.
  at::Tensor take();
  // Of this rank's rows, which stay until it goes.
  int64_t staging_bytes() const {
    return own_rows_.defined() ? static_cast<int64_t>(own_rows_.nbytes()) : 0;
  }

 private:
  friend class UnorderedReductions;
  enum class Row { kAwaited, kThere, kNone };

  bool has_from(int64_t rank);
  void check_size(int64_t rank) const;

  UnorderedReductions& owner_;
  const ReductionNumber number_;
  const uint32_t root_;
  const at::ScalarType dtype_;
  const std::string what_;
  const int64_t bytes_;
  at::Tensor own_rows_;
  std::vector<Row> state_;          // by rank
  std::vector<at::Tensor> bodies_;  // by rank
};

}  // namespace fsdp::internal
