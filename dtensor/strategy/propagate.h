// Sharding propagation: the placements to which an operator's operands are redistributed
// and those of its results, on a mesh of any number of dimensions. Each mesh dimension
// takes its cheapest placement strategy. No torch here.
#pragma once

#include "dtensor/strategy/op_schema.h"
#include "dtensor/strategy/placement_strategy.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace fsdp::internal {

// The placement strategies of a call that cut something or add up terms. Running
// replicated is always possible and not among them.
using StrategyFunction = std::function<std::vector<PlacementStrategy>(const OpSchema& call)>;

using TensorPlacements = std::vector<Placement>;  // one per mesh dimension

struct Propagation {
  std::vector<TensorPlacements> operands;  // where they go
  std::vector<TensorPlacements> results;

  bool operator==(const Propagation&) const = default;
};

// How a call lies before it runs: the mesh, and where its operands are.
struct CallPlacements {
  std::vector<int64_t> mesh_shape;
  std::vector<TensorPlacements> operands;
  // The operand that is written in place: its first result lies as it does, and it stays.
  // Where no strategy allows that, it is told to become replicated.
  std::optional<size_t> written = {};
};

// `call.parts`, `arriving` and `ranks` are set here. `results`: how many tensors the
// operator gives back.
Propagation propagate(const StrategyFunction& strategies, OpSchema call,
                      const CallPlacements& placements, size_t results);

}  // namespace fsdp::internal
