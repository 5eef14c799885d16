// The schedule of one root's FSDP units: when each is resharded, and which are
// prefetched. Its decisions cost time when wrong, never values. Pure: no torch header, no
// tensors, no ranks. They depend on the sequence of events only, so every rank decides
// alike. See docs/design/schedule.md.
//
//   const Decision decision = schedule.touched(unit, Pass::kTraining);
//   for (UnitId other : decision.reshard) ...      // empty it, then schedule.emptied(other)
//   for (UnitId other : decision.prefetch) ...     // issue its gather, then schedule.unsharded(other)
//
// An unsharded unit is waiting (for its turn: gathered explicitly, ahead, or kept), in
// turn (touched in the running kind of pass; open: by a recomputation, until a backward
// operator touches it), or over. A turn ends when a unit of the same root that is neither
// ancestor nor descendant is touched. There are no pass boundaries to rely on
// (evaluation, generation, recomputation): what is expected next comes from what followed
// before (prefetch_policy.h).
#pragma once

#include "fully_shard/schedule/prefetch_policy.h"
#include "fully_shard/schedule/unit_tree.h"

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace fsdp::internal {

struct Decision {
  std::vector<UnitId> reshard;   // to be emptied, unless something holds them
  std::vector<UnitId> drop;      // gathered ahead in vain: to be dropped
  std::vector<UnitId> prefetch;  // to be gathered now, for later

  bool operator==(const Decision&) const = default;
};

class Schedule {
 public:
  // `policy` must outlive the unit here. REQUIRES: `parent`, if any, is a unit of this
  // schedule.
  void add(UnitId unit, const UnitPolicy& policy);
  void set_parent(UnitId unit, UnitId parent) { tree_.set_parent(unit, parent); }
  void remove(UnitId unit);
  // Takes over another root's units as they are, when that root gets an ancestor.
  void absorb(Schedule&& other);

  // An unsharded unit that is touched again: nothing is to be decided.
  bool is_current(UnitId unit, Pass pass) const;
  // A unit is touched, and will be unsharded.
  Decision touched(UnitId unit, Pass pass);
  // A unit of another root on the same process group was touched.
  Decision touched_elsewhere();
  // The outermost backward that touched units of this root ended; false: more are to
  // come.
  Decision backward_ended(bool is_last);
  // The unit whose turn it is in a backward, and which gathers ahead only when its
  // gradients have left (prefetch_after_gradients); none, or nothing put off.
  std::optional<UnitId> put_off_by() const {
    return prefetch_policy_.puts_off() ? at_.current : std::nullopt;
  }
  // What it put off, to be gathered now. To be called when its gradients have left; and,
  // since ranks may differ in when that is, before every other gather and before
  // backward_ended(), so that gathers come in one order.
  std::vector<UnitId> take_put_off() { return prefetch_policy_.take_put_off(at_, unsharded_); }
  // A unit's gather was issued as decided.
  void unsharded(UnitId unit);
  // A unit was asked for explicitly: it waits for its next turn, whether it was unsharded
  // before or not.
  void unsharded_explicitly(UnitId unit);
  void emptied(UnitId unit);

  // The units to gather when `unit` is entered, instead of the expected one; none: no
  // list.
  void set_prefetch_list(UnitId unit, bool backward, std::vector<UnitId> units) {
    prefetch_policy_.set_list(unit, backward, std::move(units));
  }
  // The first since the last call, if there was one.
  std::optional<OrderChange> take_order_change() { return prefetch_policy_.take_order_change(); }
  // Forgets what was learned; what is unsharded stays so.
  void forget();

 private:
  enum class Turn : uint8_t { kNone, kWaiting, kOpen, kInTurn, kOver };
  // Visits of a kind in the running round, and in the one before (none: unknown).
  struct Visits {
    int64_t now = 0;
    std::optional<int64_t> before = {};
    void end_round();
  };
  struct State {
    const UnitPolicy* policy;
    Turn turn = Turn::kNone;
    std::array<Visits, 3> visits = {};  // by kind
  };

  bool reshards(UnitId unit, const UnitPolicy& policy) const;
  void set_turn(UnitId unit, Turn turn);
  void change_kind(PassKind kind, UnitId entered, Decision& decision);
  void enter(UnitId unit, Decision& decision);
  void end_turns(UnitId entered, Decision& decision);
  void count_visit(UnitId unit);
  void end_pass();

  UnitTree tree_;
  PrefetchPolicy prefetch_policy_;
  std::map<UnitId, State> units_;
  std::set<UnitId> unsharded_;  // whose turn is not kNone: few of many, and looked at often
  PassPosition at_;
};

}  // namespace fsdp::internal
