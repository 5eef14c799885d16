// Reductions through UnorderedReductions, of ranks that share memory: each rank reduces
// the groups that it uses, in an order of its own, and when the last backward of a step
// ends every group that some rank has used gets its sum on all ranks. Sums that are
// complete earlier are made then, so at most one reduction is on the way where the ranks
// come to their groups in one order. Those of a backward that was not the last may be on
// the way until the last one ends: one object lives as long as the process group's
// runtime, and a backward begins and ends in it.
#pragma once

#include "fully_shard/params/group_info.h"
#include "fully_shard/step/reductions.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/unordered_reductions.h"

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class ReductionsByUnit final : public Reductions {
 public:
  // Both outlive it.
  ReductionsByUnit(CommContext& comm_context, UnorderedReductions& reductions);

  // Groups that can be reduced so: nobody else's collectives are in between.
  static bool can_reduce(FSDPParamGroup& group);

  void begin(Reach reach);
  void meet(const std::shared_ptr<Root>& root, const std::vector<FSDPParamGroup*>& owing) override;
  void came_late(FSDPParamGroup& group) override { late_.insert(&group); }
  void remove(FSDPParamGroup& group) override;
  // Nothing is waited for before the end, since this rank waits for others in
  // collectives.
  void wait_at_the_end_only() { waits_ = Waits::kAtTheEnd; }

  // The backward is done. What the step has brought where it was the last, on all ranks
  // in one order; then collective over the dimension.
  std::vector<ReducedRow> finish();
  // Whether that was the last backward of the step, with something to reduce.
  bool has_ended_step() const { return has_ended_step_; }
  void abort() noexcept;

 private:
  // Bytes that count as staging (fully_shard/counters.h) while it lives.
  class Staging {
   public:
    Staging(const GroupAccounts& accounts, int64_t bytes);
    ~Staging();
    Staging(Staging&& from) noexcept;

   private:
    GroupAccounts accounts_;
    int64_t bytes_;
  };
  // One part of one group's gradients.
  struct OnTheWay {
    std::shared_ptr<Unit> unit;
    ReduceScatterInput input;
    std::unique_ptr<UnorderedReduction> sum;
    std::optional<Staging> staging = std::nullopt;
    at::Tensor row = {};  // the sum, once it is there
  };
  enum class Waits { kAsNeeded, kAtTheEnd };

  void send(FSDPParamGroup& group) override { send_parts(group); }
  int64_t send_parts(FSDPParamGroup& group);  // how many: one for each dtype
  void send_late();
  void receive(OnTheWay& reduction);
  void receive_what_has_come();
  std::optional<OnTheWay> join(const ReductionNumber& number);
  std::vector<ReductionNumber> await_end_of_step(std::vector<ReductionNumber> sent);
  std::vector<ReducedRow> end_step();
  void end_backward();
  UnorderedReductions::Backward backward() const;

  CommContext& comm_context_;
  UnorderedReductions& reductions_;
  std::set<std::shared_ptr<Root>> roots_;
  std::set<const FSDPParamGroup*> planned_;
  std::map<const FSDPParamGroup*, uint32_t> rounds_;  // sent, of each group
  std::set<FSDPParamGroup*> late_;
  std::list<OnTheWay> step_;  // what this rank has sent in it, in that order
  Waits waits_ = Waits::kAsNeeded;
  bool has_ended_step_ = false;  // the backward before
};

}  // namespace fsdp::internal
