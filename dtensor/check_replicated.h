// For finding mistakes: whether plain tensors that meet DTensors are the same on all
// ranks, which they count as.
#pragma once

namespace fsdp {

// Compares, before each operator on DTensors, the plain tensors among its operands over
// the mesh, by a hash of their values, shape and dtype; not those that are each rank's
// own beside what comes from a parameter of fully_shard. What differs becomes a
// ValueError on every rank of the mesh, which names operator, operand and the ranks.
// Costs a pass over those tensors and one small collective per mesh dimension and
// operator. Off by default; process-wide; call it on every rank, while no operator runs.
void set_check_replicated(bool on);

}  // namespace fsdp
