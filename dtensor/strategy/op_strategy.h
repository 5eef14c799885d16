// The sharding strategy of an operator: its placement strategies for a call, the geometry
// of its results, and the sizes that it is called with on a rank's parts. No torch here.
#pragma once

#include "dtensor/layout/tensor_layout.h"
#include "dtensor/strategy/op_schema.h"
#include "dtensor/strategy/propagate.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp::internal {

// How a whole result lies in memory.
struct ResultGeometry {
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;

  bool operator==(const ResultGeometry&) const = default;
};
ResultGeometry contiguous(std::vector<int64_t> shape);
// Without gaps, the dimensions in the order in memory that `stride` gives them.
ResultGeometry laid_as(std::vector<int64_t> shape, const std::vector<int64_t>& stride);
// Contiguous but for dimensions `a` and `b`, which change places in memory.
ResultGeometry transposed(std::vector<int64_t> shape, size_t a, size_t b);

// One per result; any for those that the operator leaves undefined. The shapes must be
// right, but for what some devices' kernels leave out (wrap_results.h); the strides are
// best so: a result that lies otherwise in memory is copied.
using ResultsOf = std::function<std::vector<ResultGeometry>(const OpSchema& call)>;

// How a call lies once its operands are where they go, and where a rank is.
struct PlacedCall {
  std::vector<TensorLayout> operands;  // any for absent ones
  std::vector<TensorLayout> results;
  std::vector<int64_t> coordinate;
};

// A plain argument, by place in the schema, as it is for a rank's parts: sizes, mostly.
struct PartArgument {
  size_t place;
  PlainArgument value;
};
using PartArgumentsOf =
    std::function<std::vector<PartArgument>(const OpSchema& call, const PlacedCall& placed)>;

// What each mesh dimension does, where that depends on what the others do.
using PropagationOf =
    std::function<Propagation(const OpSchema& call, const CallPlacements& placements)>;

struct OpStrategy {
  bool any() const { return strategies != nullptr || propagation != nullptr; }

  StrategyFunction strategies = nullptr;
  PropagationOf propagation = nullptr;       // instead of `strategies`
  ResultsOf results = nullptr;               // null: LibTorch's meta kernel knows
  PartArgumentsOf part_arguments = nullptr;  // null: parts take the arguments as they are
  // Places of real numbers that these depend on. Others are not looked at: most differ
  // from call to call.
  std::vector<size_t> reals = {};
};
// `known` with the placement strategies of `more` after its own.
OpStrategy with_more_strategies(const OpStrategy& known, const StrategyFunction& more);

}  // namespace fsdp::internal
