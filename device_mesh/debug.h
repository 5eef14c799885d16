// Checks for finding mistakes, which cost too much to be always on.
//
//   fsdp::set_debug_options({.write_checks = true, .check_replicated = true});
#pragma once

#include "device_mesh/api.h"

namespace fsdp {

struct DebugOptions {
  // Looks for writes to parameters that pass no operator and were not announced, through
  // raw pointers and through to_local() aliases, and throws at the next use of the unit,
  // naming the parameter. Costs a comparison of this rank's shards whenever a unit is
  // emptied. Set it before training.
  bool write_checks = false;
  // Compares, before each operator on DTensors, the plain tensors among its operands over
  // the mesh, by a hash of their values, shape and dtype: they count as the same on all
  // ranks, but for those that are each rank's own beside what comes from a parameter of
  // fully_shard. What differs becomes a ValueError on every rank of the mesh, which names
  // operator, operand and the ranks. Costs a pass over those tensors and one small
  // collective per mesh dimension and operator. Set it alike on every rank.
  bool check_replicated = false;
  // Warns, once for each root and rank, where a training forward enters its units in
  // another order than the one before, naming the units; that it ends elsewhere, or that
  // several run before a backward, is no other order. That is legal where all ranks do so
  // alike; what was gathered ahead for the old order was in vain. Costs nothing to speak
  // of.
  bool order_changes = false;
};

// Process-wide; call it while no operator runs. What is not named is off. Local.
FSDP_API void set_debug_options(DebugOptions options);
[[nodiscard]] FSDP_API DebugOptions debug_options();

}  // namespace fsdp
