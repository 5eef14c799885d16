// fully_shard on a whole model in one call: a policy chooses the units.
//
//   std::cout << fsdp::plan_units(model, fsdp::by_type<Block>());   // what it would do
//   fsdp::auto_shard(model, fsdp::by_type<Block>(), mesh);          // every block, the model
//
// FSDP1's auto_wrap_policy. The module that is given, the root, becomes a unit whatever
// the policy thinks of it; the policy is asked about those below (wrap_policy.h). They
// are asked in post-order, so that a unit comes after the units below it: children in the
// order of their registration, a shared module once, by the first path that leads to it.
// A module all of whose parameters are ignored is left out, with what is below it.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"
#include "dtensor/placement.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/policies.h"
#include "fully_shard/wrap_policy.h"

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

// The units that auto_shard() would make, to be printed and compared.

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

// The units that auto_shard would make, without making them; with `ranks`, the number of
// ranks that would shard, also how options.shard_placement_fn places their parameters,
// and which ranks own those that it places Owned{}. Local; needs no processes.
//
// Throws ValueError, naming the module, for a null root, a unit at or below the root, a
// container without forward (ModuleList, ModuleDict, ParameterList, ParameterDict) as
// root or chosen by the policy, and a module with parameters that would be in two units,
// since it is shared and no unit itself; with `ranks` also for less than 1, and for a
// placement that does not fit its parameter.
[[nodiscard]] FSDP_API UnitPlan plan_units(ModuleRef root, const WrapPolicy& policy,
                                           const FullyShardOptions& options = {},
                                           std::optional<int64_t> ranks = std::nullopt);

// Makes the root, and what the policy chooses below it, units over the mesh, and returns
// the root's. `options` are every unit's unless the policy gives others; ignored
// parameters are ignored by all. Every rank must give the same. Local, except that the
// first call on a mesh is collective.
//
// Throws what plan_units and fully_shard throw, for any of the units, before the first is
// made.
FSDP_API FSDPModule auto_shard(ModuleRef root, const WrapPolicy& policy,
                               const DeviceMesh& mesh = default_mesh(),
                               FullyShardOptions options = {});

}  // namespace fsdp
