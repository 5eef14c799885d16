// The hierarchy of FSDP units: which one encloses which. A unit is a root until it is
// given a parent. Pure.
//
//   tree.set_parent(/*unit=*/block, /*parent=*/model);
//   tree.is_related(block, model);   // true, and so the other way round
#pragma once

#include "fully_shard/schedule/unit_id.h"

#include <map>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
