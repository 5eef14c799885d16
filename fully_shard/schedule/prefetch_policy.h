// The implicit and explicit prefetching of FSDP2, for the units of one root: which units
// are gathered ahead when one is entered, and which of them were gathered in vain.
// Explicit are the lists of set_modules_to_forward_prefetch and
// set_modules_to_backward_prefetch. Implicit is a guess: the unit that followed the last
// time (Successors). Pure.
//
// Where the pass is, and which units are unsharded, is for the caller to say:
//
//   prefetch_policy.learn(position, /*next=*/unit);   // before `unit` is entered
//   position.enter(unit);
//   for (UnitId other : prefetch_policy.entered(position, unsharded)) ...   // issue its gather
//
// What was chosen is ahead until its unit is touched, emptied or unsharded explicitly.
#pragma once

#include "fully_shard/schedule/unit_tree.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::internal {

// What follows what, as it was last seen: for each kind of pass, the unit that was
// entered after a previous and a current one, or that the pass ended there. There are no
// pass boundaries to rely on, so two units of history tell the first visit of a unit from
// its later ones. Pure.
//
//   // Returns what followed before, if it changed.
//   successors.learn(PassKind::kTraining, /*previous=*/a, /*current=*/b, /*next=*/c);
//   *successors.after(PassKind::kTraining, a, b);    // c
//   successors.after(PassKind::kTraining, a, d);     // null: never seen
class Successors {
 public:
  using Unit = std::optional<UnitId>;  // or none

  // What followed there the last time, where it was another.
  std::optional<Unit> learn(PassKind kind, Unit previous, UnitId current, Unit next) {
    const auto [seen, is_new] = seen_.try_emplace({kind, previous, current}, next);
    const auto before = std::exchange(seen->second, next);
    return is_new || before == next ? std::nullopt : std::optional<Unit>(before);
  }
  // Null: never seen.
  const Unit* after(PassKind kind, Unit previous, UnitId current) const {
    const auto found = seen_.find({kind, previous, current});
    return found == seen_.end() ? nullptr : &found->second;
  }
  void forget() { seen_.clear(); }
  void remove(UnitId unit) {
    std::erase_if(seen_, [unit](const auto& item) {
      const auto& [kind, previous, current] = item.first;
      return previous == unit || current == unit || item.second == unit;
    });
  }
  // Takes over what was seen of other units.
  void absorb(Successors&& other) { seen_.merge(other.seen_); }

 private:
  std::map<std::tuple<PassKind, Unit, UnitId>, Unit> seen_;
};

// What followed a unit in a training forward, where it was another one the time before. A
// forward that ends there, or starts again, is no change: there may be several before a
// backward.
struct OrderChange {
  UnitId unit, before, now;

  bool operator==(const OrderChange&) const = default;
};

class PrefetchPolicy {
 public:
  // `policy` must outlive the unit here.
  void add(UnitId unit, const UnitPolicy& policy) { units_.emplace(unit, State{&policy}); }
  void remove(UnitId unit);
  // Takes over another root's units, and what was learned of them.
  void absorb(PrefetchPolicy&& other);

  // The explicit prefetches when `unit` is entered, instead of the implicit one; none: no
  // list. Units that were not added are left out.
  void set_list(UnitId unit, bool backward, std::vector<UnitId> units);

  // `next` is to be entered after the current unit; none: the pass ends.
  // REQUIRES: the position has a kind and a current unit.
  void learn(const PassPosition& at, std::optional<UnitId> next);
  // The first since the last call, if there was one.
  std::optional<OrderChange> take_order_change() { return std::exchange(order_change_, {}); }
  // Forgets what was learned; what is ahead stays.
  void forget();

  // What to gather now that the current unit was entered; nothing where it puts that off
  // (prefetch_after_gradients). REQUIRES: the position has a kind and a current unit.
  std::vector<UnitId> entered(const PassPosition& at, const std::set<UnitId>& unsharded);
  // Whether the unit that was entered last has not chosen yet.
  bool puts_off() const { return puts_off_; }
  std::vector<UnitId> take_put_off(const PassPosition& at, const std::set<UnitId>& unsharded);

  bool is_ahead(UnitId unit) const { return listed_.contains(unit) || guesses_.contains(unit); }
  // What is expected of a unit came, or was set aside.
  void clear_ahead(UnitId unit);
  void clear_all_ahead();
  // A unit is entered: adds to `drop` the guesses that did not come true in time.
  void age_guesses(UnitId entered, const std::set<UnitId>& unsharded, std::vector<UnitId>& drop);
  // The kind of pass changes: adds to `drop` what lists chose in vain.
  void drop_listed(UnitId entered, const std::set<UnitId>& unsharded, std::vector<UnitId>& drop);

 private:
  struct State {
    const UnitPolicy* policy;
    std::vector<UnitId> forward_list = {}, backward_list = {};
  };

  std::vector<UnitId> choose(const PassPosition& at, const std::set<UnitId>& unsharded);
  std::optional<UnitId> expected_successor(const PassPosition& at) const;

  std::map<UnitId, State> units_;
  std::set<UnitId> listed_;            // ahead by a list
  std::map<UnitId, int64_t> guesses_;  // ahead by a guess, with the units entered since
  Successors successors_;
  std::optional<OrderChange> order_change_;
  bool puts_off_ = false;
};

}  // namespace fsdp::internal
