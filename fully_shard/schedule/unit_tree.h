// What the schedule knows of units, without modules and tensors: their numbers, what the
// user asked of each, which one encloses which, and which of a root's were entered last.
// Pure.
#pragma once

#include "on_demand/pass.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

namespace fsdp::internal {

// Numbers units in the order in which fully_shard made them; unique in the process.
using UnitId = int64_t;

// The passes that the schedule tells apart: a recomputation belongs to its backward, and
// the forward before it to the training.
enum class PassKind : uint8_t { kTraining, kInference, kBackward };

inline PassKind kind_of(Pass pass) {
  if (in_backward(pass)) return PassKind::kBackward;
  return pass == Pass::kInference ? PassKind::kInference : PassKind::kTraining;
}

// The position of a root in the running pass: the kind of the pass, and the units that
// were entered last and first. There is none before the first touch.
struct PassPosition {
  std::optional<PassKind> kind = {};
  std::optional<UnitId> previous = {}, current = {};
  std::optional<UnitId> first = {};  // entered first since the kind changed

  void enter(UnitId unit) {
    if (!current) first = unit;
    previous = std::exchange(current, unit);
  }
  // The kind stays.
  void leave_units() { previous = current = first = std::nullopt; }
  void remove(UnitId unit) {
    for (auto* entered : {&previous, &current, &first}) {
      if (*entered == unit) entered->reset();
    }
  }
};

// What a user asked of one unit, as data: read by whoever decides when the unit is
// gathered, resharded and reduced. Free of tensors, so that deciding can be tested alone.
struct UnitPolicy {
  std::optional<bool> reshard_after_forward = {};  // unset: true, and false for a root
  bool reshard_after_backward = true;
  bool synchronize_gradients = true;  // false: backwards leave full gradients pending
  bool all_reduce_gradients = true;   // hybrid sharding: false keeps the sums over the shards
  bool reduce_unused_params = false;  // reduce what nobody used too: zeros
  bool prefetch_in_backward = true;
  bool prefetch_after_gradients = false;              // in backward: not when the unit is entered
  bool full_precision = false;                        // param_dtype is not applied
  std::optional<double> gradient_divide_factor = {};  // unset: the number of ranks
};

// Which unit encloses which. A unit is a root until it is given a parent.
//
//   tree.set_parent(/*unit=*/block, /*parent=*/model);
//   tree.is_related(block, model);   // true, and so the other way round
class UnitTree {
 public:
  void set_parent(UnitId unit, UnitId parent) { parents_[unit] = parent; }
  // The units below it become roots.
  void remove(UnitId unit);
  // Takes over the units of another tree as they are.
  void absorb(UnitTree&& other) { parents_.merge(other.parents_); }

  bool is_root(UnitId unit) const { return !parents_.contains(unit); }
  // Whether one is an ancestor of the other.
  bool is_related(UnitId a, UnitId b) const { return is_ancestor(a, b) || is_ancestor(b, a); }
  bool has_descendants(UnitId unit) const;

 private:
  bool is_ancestor(UnitId ancestor, UnitId unit) const;

  std::map<UnitId, UnitId> parents_;  // of the units that have one
};

inline void UnitTree::remove(UnitId unit) {
  std::erase_if(parents_, [unit](const auto& item) {
    const auto& [child, parent] = item;
    return child == unit || parent == unit;
  });
}

inline bool UnitTree::is_ancestor(UnitId ancestor, UnitId unit) const {
  for (auto above = parents_.find(unit); above != parents_.end();
       above = parents_.find(above->second)) {
    if (above->second == ancestor) return true;
  }
  return false;
}

inline bool UnitTree::has_descendants(UnitId unit) const {
  return std::any_of(parents_.begin(), parents_.end(),
                     [unit](const auto& item) { return item.second == unit; });
}

}  // namespace fsdp::internal
