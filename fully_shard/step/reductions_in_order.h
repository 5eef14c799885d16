// Reductions through Transport::reduce(): collective over the mesh, so all ranks reduce
// the same groups in the same order. What arrives where, and when, may differ between
// ranks: what has not arrived when a group leaves is sent as zeros, and the last group
// leaves at the end, with a flag that tells of gradients that came late on some rank.
// Then all groups reduce once more.
//
// Destroying it before finish() is the abort: what is in flight is waited for.
#pragma once

#include "fully_shard/step/reductions.h"

#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::internal {

class ReductionsInOrder final : public Reductions {
 public:
  explicit ReductionsInOrder(Reach reach) : Reductions(reach) {}

  void came_late(FSDPParamGroup&) override { late_ = Late::kSome; }
  // The backward is done: what all of these have brought, but for what is kept with its
  // group. roots: that it has met.
  std::vector<ReducedRow> finish(const std::set<std::shared_ptr<Root>>& roots);
  void abort() noexcept;

 private:
  using Late = ReduceScatterInput::Late;
  void send(FSDPParamGroup& group) override { send_parts(group); }
  int64_t send_parts(FSDPParamGroup& group);  // how many: one for each dtype
  void receive_in_flight();
  void receive_last();
  void exchange_on_host(const std::set<std::shared_ptr<Root>>& roots, size_t first);
  bool is_late_anywhere() const;
  void send_late(const std::set<std::shared_ptr<Root>>& roots);

  std::optional<GradientReduction> in_flight_;  // one at a time bounds the memory
  std::vector<GradientReduction> received_;     // all with their replicas' sums but the last
  Late late_ = Late::kNone;                     // on this rank
};

}  // namespace fsdp::internal
