// The units that auto_shard() would make, to be printed and compared.
#pragma once

#include "device_mesh/api.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fsdp {

struct PlannedPlacement {
  std::string parameter;  // from the unit's module: "up.weight"
  Placement placement;

  bool operator==(const PlannedPlacement&) const = default;
};

struct PlannedUnit {
  std::string path;  // from the root; empty for the root itself
  std::string type;  // the module's class
  int64_t numel;     // global elements of the parameters that the unit would have
  // Of its parameters that would not be cut as Shard(0), where the number of ranks was
  // given.
  std::vector<PlannedPlacement> placements = {};

  bool operator==(const PlannedUnit&) const = default;
};

struct UnitPlan {
  std::vector<PlannedUnit> units;  // in the order in which they are made; the root is last

  bool operator==(const UnitPlan&) const = default;
};

// A line per unit: "block0: BlockImpl, 288 elements"; below it one per placement:
// "  up.weight: Owned(1)".
FSDP_API std::string to_string(const UnitPlan& plan);
FSDP_API std::ostream& operator<<(std::ostream& out, const UnitPlan& plan);

}  // namespace fsdp
