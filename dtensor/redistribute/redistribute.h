// Moving a DTensor's value from one list of placements to another, one mesh dimension at
// a time.
//
//   from \ to     Shard(b)              Replicate        Partial(q)
//   Shard(a)      all-to-all            all-gather       all-gather, then as from Replicate
//   Replicate     this rank's chunk     -                coordinate 0 keeps it, others the neutral
//                                                        (avg, min, max: everyone keeps it)
//   Partial(p)    reduce-scatter        all-reduce       all-reduce, then as from Replicate
//
// An interleaved cut moves so along its atoms; from one cut to another of which one is
// interleaved over Replicate where both are, or cut one dimension.
//
// Equal placements and mesh dimensions of size 1 move nothing. Below autograd; nothing
// here is differentiable.
//
// What comes from sharded parameters must have come of the same numbers on all ranks that
// a move brings together (scalar_hash.h): ValueError on all of them otherwise.
#pragma once

#include "dtensor/layout/shard_layout.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// This rank's part of a plain tensor of the global shape; a view (never `full` itself),
// but of a cut in several blocks a copy. Local. REQUIRES: no Partial placement.
at::Tensor local_part(const at::Tensor& full, const DTensorSpec& spec);

// What this rank holds of `full`, a plain tensor of the global shape, placed as `spec`:
// of a Partial the value as one term. May share memory. Local.
at::Tensor placed_whole(const at::Tensor& full, const DTensorSpec& spec);

// Whether the move sends anything.
bool must_move(const DTensorSpec& from, const std::vector<Placement>& to);

// This rank's local tensor after the move; `local` itself when nothing moves. Collective
// over the mesh dimensions that change.
at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from,
                              const std::vector<Placement>& to);

// The same of a DTensor; its local tensor itself when nothing moves.
at::Tensor moved_part(const at::Tensor& dtensor, const std::vector<Placement>& to);

// The same for a whole DTensor; `dtensor` itself when the placements are equal.
at::Tensor redistribute_dtensor(const at::Tensor& dtensor, const std::vector<Placement>& to);

// The value of a DTensor, on this rank, to be read. Collective over the mesh dimensions
// that cut it or have terms of it.
at::Tensor whole_value(const at::Tensor& dtensor);

// The DTensor with every Partial turned into Replicate. Collective where there is one.
at::Tensor reduce_partials(const at::Tensor& dtensor);

}  // namespace fsdp::internal
