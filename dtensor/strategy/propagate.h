// Where an operator's operands go and its results lie, on a mesh of any number of
// dimensions: each goes the cheapest way on its own. No torch here.
#pragma once

#include "dtensor/strategy/call_geometry.h"
#include "dtensor/strategy/way.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace fsdp::internal {

// The ways of a family's operators that cut something or add up terms; running replicated
// goes without saying.
using WaysOf = std::function<std::vector<Way>(const CallGeometry& call)>;

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
  // Where no way has that it is told to become replicated.
  std::optional<size_t> written = {};
};

// `call.parts`, `arriving` and `ranks` are set here. `results`: how many tensors the
// operator gives back.
Propagation propagate(const WaysOf& ways, CallGeometry call, const CallPlacements& placements,
                      size_t results);

}  // namespace fsdp::internal
