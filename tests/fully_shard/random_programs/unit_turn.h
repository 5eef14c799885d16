// The turn of a unit, as an oracle sees it.
#pragma once

#include <optional>
#include <set>
#include <string>

namespace fsdp::testing {

// A unit was touched, until another one is.
struct UnitTurn {
  std::string what;  // the kind of pass and the unit
  int unit = 0;
  bool in_backward = false;
  std::set<int> resident_before = {};  // units: entering this one may empty some
  // The units whose gathers are on their way when this one is entered, and when its
  // gradients have left; none: they left later.
  std::set<int> on_the_way = {};
  std::optional<std::set<int>> on_the_way_after_gradients = {};

  bool needs_gather() const { return !resident_before.contains(unit); }
  bool operator==(const UnitTurn& other) const { return what == other.what; }
};

}  // namespace fsdp::testing
