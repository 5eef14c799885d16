// What follows what, as it was last seen: for each kind of pass, the unit that was
// entered after a previous and a current one, or that the pass ended there. There are no
// pass boundaries to rely on, so two units of history tell the first visit of a unit from
// its later ones. Pure.
//
//   // Returns what followed before, if it changed.
//   successors.learn(PassKind::kTraining, /*previous=*/a, /*current=*/b, /*next=*/c);
//   *successors.after(PassKind::kTraining, a, b);    // c
//   successors.after(PassKind::kTraining, a, d);     // null: never seen
#pragma once

#include "fully_shard/schedule/pass_kind.h"
#include "fully_shard/schedule/unit_id.h"

#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
