// Sharding propagation: the placements to which an operator's operands are redistributed
// and those of its results, on a mesh of any number of dimensions. Each mesh dimension
// takes the cheapest of the placement strategies that fit the call. No torch here.
#pragma once

#include "dtensor/placement.h"
#include "dtensor/strategy/op_schema.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

// How a call that lies as `placements` is sharded. `call.parts`, `arriving` and `ranks`
// are set here. `results`: how many tensors the operator gives back.
Propagation propagate(const StrategyFunction& strategies, OpSchema call,
                      const CallPlacements& placements, size_t results);

// What propagate() does along each mesh dimension: the strategies that the call may take,
// and the cheapest of them.

// An operator does not ask which elements of a dimension a rank has, as long as all that
// is cut alike has the same: so a strategy of plain shards is one of interleaved shards,
// too.
//
// `strategies`, and each of them once more for every interleaved shard among the
// operands' placements that lets an operand stay as it is. Not where dimensions of
// several lengths are cut, which then do not go together element by element, nor for
// interleaved strategies.
std::vector<PlacementStrategy> with_interleaved_strategies(
    std::vector<PlacementStrategy> strategies, const OpSchema& call);

// Some of LibTorch's kernels refuse an empty part, or divide by its size: their
// strategies fit only where every rank has elements.
//
// `strategies` without those that take no empty parts (takes_empty_parts) and would leave
// an empty part of an operand on some rank.
std::vector<PlacementStrategy> without_empty_parts(std::vector<PlacementStrategy> strategies,
                                                   const OpSchema& call);

// What one operand brings along one mesh dimension.
struct Arrival {
  Placement placement = Replicate{};
  int64_t bytes = 0;  // of the whole tensor
};

// The cost of redistributing operands along one mesh dimension, in bytes that move. It
// depends on nothing but what all ranks know alike, so they choose the same placement
// strategy without a message (cheapest_strategy()).
//
//   from \ to     Shard(b)   Replicate   Partial
//   Shard(a)      1/parts    1           1          a == b: nothing
//   Replicate     0          -           0
//   Partial       1          2           2          the same Partial: nothing
//
// Bytes that a tensor of `bytes` costs to move, times `parts`, the ranks of the mesh
// dimension: a whole number. Nothing where there is one part.
int64_t redistribute_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t parts);

// The cheapest of `strategies`, the first of equally cheap ones. Only those count that
// let an operand which is not replicated stay as it is: nothing is cut that came whole.
// Null where there is none, or where running replicated is cheaper.
const PlacementStrategy* cheapest_strategy(const std::vector<PlacementStrategy>& strategies,
                                           const std::vector<Arrival>& operands, int64_t parts);

}  // namespace fsdp::internal
